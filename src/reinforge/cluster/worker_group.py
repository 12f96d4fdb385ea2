"""The actors of one role: placed, watched, and ended.

A role (policy, engine, critic, reward) is a `WorkerGroup` of one actor or of several ranks. Whoever
waits for one of its actors also waits for news of the others, and asks for a sign of life where
none comes: a death, a lost machine and a hang all become `ActorLost` within a bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from reinforge.cluster.actor import Actor, ActorAddress, ActorReply
from reinforge.cluster.connect import (
    GetTimeoutError,
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
    RayError,
    RayTaskError,
    ray,
)
from reinforge.cluster.environment import forwarded
from reinforge.cluster.errors import ActorLost
from reinforge.cluster.placement import ActorPlacement, rank_order
from reinforge.cluster.resources import ResourcePool
from reinforge.cluster.transport import pack, unpack
from reinforge.core import errors
from reinforge.core.errors import InputError, ReinforgeError

GRACE = 3.0  # seconds for the first rank to tell why another one ended
LOOK = 1.0  # seconds between two looks at the other ranks, in an event loop


class WorkerGroup:
    """The actors of one role: one, or the ranks of one backend. Rank 0 is asked, the others follow
    it. `RayCluster` makes it; remote backends, engines and rewards call methods of objects in it.
    """

    def __init__(self, resources: ResourcePool, role: str, places: Sequence[ActorPlacement]):
        self.resources = resources
        self.cfg = resources.cfg
        self.role = role
        self.places = places
        self.actors: list[Any] = []
        self.where: list[ActorAddress] = []
        self.fate: str | None = None  # why it was ended by force
        # one reference per rank other than 0; it resolves when the rank ends
        self.following: list[Any] = []

    # ---- begin and end ----

    def launch(self) -> None:
        """Asks Ray for the actors, and does not wait for them."""
        shares = self.resources.shares()
        self.actors = []
        for place in self.places:
            spare = self.resources.spare(place)
            there = spare is not None and self._answers(spare)
            self.actors.append(spare if there else self._make(shares, place))

    def _make(self, shares: Mapping[int, tuple[int, int]], place: ActorPlacement) -> Any:
        strategy = PlacementGroupSchedulingStrategy(self.resources.group(), place.bundle)
        paths = [p or os.getcwd() for p in sys.path]
        return _Actor.options(
            num_cpus=place.cpus, num_gpus=place.gpus, scheduling_strategy=strategy
        ).remote(forwarded(os.environ), os.getcwd(), paths, *shares[place.bundle])

    def ready(self) -> None:
        """Waits until the actors are there, and makes ranks of them: those of one machine are
        neighbours, in the order of its devices.
        """
        if self.where or not self.actors:
            return
        found = self._get([actor.ping.remote() for actor in self.actors], self.cfg.start)
        order = rank_order(
            [where.node for where in found],
            [where.ip for where in found],
            [where.devices for where in found],
        )
        self.actors = [self.actors[i] for i in order]
        self.places = [self.places[i] for i in order]
        self.where = [found[i] for i in order]
        for actor in self.actors if self.resources.modules else ():
            actor.warm.remote(self.resources.modules)
        if len(self.actors) > 1:
            self._rendezvous()
        self.resources.warm_up(partial(self._make, self.resources.shares()))

    def _answers(self, spare: Any) -> bool:
        """Whether a spare is there: it may have been lost with the others."""
        ping = spare.ping.remote()
        if not ray.wait([ping], timeout=self.cfg.heartbeat)[0]:
            return False
        with contextlib.suppress(RayError):
            ray.get(ping)
            return True
        return False

    def _rendezvous(self) -> None:
        first = self.actors[0]
        size = len(self.actors)
        port = self._get(first.port.remote(), self.cfg.start)
        shared = {
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": self.where[0].ip,
            "MASTER_PORT": str(port),
        }
        nodes = [where.node for where in self.where]
        told = []
        for rank, (actor, place) in enumerate(zip(self.actors, self.places, strict=True)):
            # an actor sees only the GPUs that are its own
            local = 0 if place.gpus else nodes[:rank].count(nodes[rank])
            own = {
                "RANK": str(rank),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(nodes.count(nodes[rank])),
            }
            told.append(actor.setenv.remote({**shared, **own}))
        self._get(told, self.cfg.start)
        self.following = [actor.follow.remote() for actor in self.actors[1:]]

    def stop(self, gently: bool = False) -> None:
        """Ends the actors.

        `gently`: those that have an end of their own (ranks, servers of an engine) have some
        seconds for it.
        """
        if gently:
            ends = [actor.end.remote() for actor in self.actors[:1]]
            with contextlib.suppress(RayError):
                ray.wait(ends, num_returns=len(ends), timeout=10.0)
        for actor in self.actors:
            ray.kill(actor)
        if not gently:
            # a stopped process hears nothing; and its memory must be free before the next one
            # starts
            for where in self.where:
                _end(where)
        self.actors = []
        self.where = []
        self.following = []

    def clear(self) -> bool:
        """Whether the actor lives, and has forgotten everything."""
        if (
            not self.actors
            or not ray.wait([done := self.actors[0].clear.remote()], timeout=self.cfg.heartbeat)[0]
        ):
            return False
        with contextlib.suppress(RayError):
            ray.get(done)
            return True
        return False

    @property
    def first(self) -> Any:
        if not self.actors:
            raise ActorLost(self.role, self.fate or "was ended")
        return self.actors[0]

    # ---- work ----

    def make(self, name: str, factory: Callable[..., Any], *args: Any) -> None:
        """An object in the first actor: `factory(objects, *args)`, with the objects that are there
        already.
        """
        self._open(self.wait(self.first.make.remote(name, pack((factory, args))), self.cfg.start))

    def call(self, name: str, method: str, *args: Any, views: bool = False) -> Any:
        return self._open(
            self.wait(self.first.call.remote(name, method, pack((None, args)), views)), views
        )

    def apply(
        self, name: str, function: Callable[..., Any], *args: Any, views: bool = False
    ) -> Any:
        """What `function(object, *args)` returns, there."""
        return self._open(
            self.wait(self.first.call.remote(name, "", pack((function, args)), views)), views
        )

    async def ask(self, method: str, *args: Any, limit: float | None = None) -> Any:
        """A method of the actor itself; the event loop goes on meanwhile."""
        return self._open(await self.wait_async(getattr(self.first, method).remote(*args), limit))

    def send(self, name: str, method: str, *args: Any) -> None:
        """Without waiting: calls arrive in the order in which they were sent, and who asks later
        hears of a loss.
        """
        if self.actors:
            self.actors[0].call.remote(name, method, pack((None, args)))

    async def acall(self, name: str, method: str, *args: Any) -> Any:
        return await self.ask("acall", name, method, pack((None, args)))

    def _open(self, answer: Any, views: bool = False) -> Any:
        if not isinstance(answer, ActorReply):
            return answer
        if answer.error is None:
            value = unpack(answer.value, views=views)
            return value if answer.refs is None else (answer.refs, value)
        if answer.error == "InputError":
            raise InputError(**answer.detail)
        if answer.error:
            raise getattr(errors, answer.error, errors.StoppedByPolicy)(answer.detail)
        raise self.cause(RuntimeError(f"in the actor {self.role}:\n{answer.detail}"))

    def cause(self, error: BaseException) -> BaseException:
        """Where an error in the first actor comes from: the loss of another rank, which looks like
        any other trouble there, or itself.
        """
        dead = None if isinstance(error, ReinforgeError) else self._ended_rank()
        return error if dead is None else ActorLost(self.role, dead)

    # ---- waiting ----

    def wait(self, ref: Any, limit: float | None = None) -> Any:
        """The result, or `ActorLost`. Blocks, as the work would here."""
        until = time.monotonic() + (limit or self.cfg.timeout)
        while True:
            ready, _ = ray.wait(
                [ref, *self.following],
                timeout=min(self.cfg.heartbeat, max(0.0, until - time.monotonic())),
            )
            if ref in ready:
                return self._get(ref, None)
            if ready:
                return self._rank_lost(ref)
            self._check_alive()
            if time.monotonic() > until:
                raise self._hung(
                    f"has worked for more than {limit or self.cfg.timeout:g} s (cluster.timeout)"
                )

    async def wait_async(self, ref: Any, limit: float | None = None) -> Any:
        """The same in an event loop that goes on."""
        until = time.monotonic() + (limit or self.cfg.timeout)
        future = _future(ref)
        sign = time.monotonic() + self.cfg.heartbeat  # when one of life is asked for
        try:
            while not future.done():
                await asyncio.wait([future], timeout=min(LOOK, self.cfg.heartbeat))
                if future.done():
                    break
                if dead := self._ended_rank():
                    await asyncio.wait([future], timeout=GRACE)
                    if future.done():
                        break
                    raise ActorLost(self.role, dead)
                if time.monotonic() < sign:
                    continue
                sign = time.monotonic() + self.cfg.heartbeat
                pings = [_future(actor.ping.remote()) for actor in self.actors]
                await asyncio.wait(
                    [future, *pings], timeout=self.cfg.heartbeat, return_when=asyncio.ALL_COMPLETED
                )
                if not future.done() and not all(ping.done() for ping in pings):
                    raise self._hung(
                        f"gave no sign of life for {self.cfg.heartbeat:g} s (cluster.heartbeat)"
                    )
                if time.monotonic() > until:
                    raise self._hung(
                        f"has worked for more than {limit or self.cfg.timeout:g} s"
                        " (cluster.timeout)"
                    )
        except asyncio.CancelledError:
            future.cancel()
            raise
        with self._ray_errors():
            return future.result()

    def _get(self, ref: Any, seconds: float | None) -> Any:
        with self._ray_errors():
            return ray.get(ref, timeout=seconds)

    @contextlib.contextmanager
    def _ray_errors(self) -> Iterator[None]:
        try:
            yield
        except GetTimeoutError as error:
            raise self._hung(
                f"did not start within {self.cfg.start:g} s (cluster.start)"
            ) from error
        except RayTaskError:  # the actor lives, and something before our own code failed
            raise
        except RayError as error:
            raise ActorLost(self.role, _reason(error)) from error

    def _rank_lost(self, ref: Any) -> Any:
        """A rank has ended. What the first one says of it is better than that it is gone."""
        dead = self._ended_rank() or "a rank ended"
        if ray.wait([ref], timeout=GRACE)[0]:
            answer = self._get(ref, None)
            if isinstance(answer, ActorReply) and answer.error in ("InputError", "StoppedByPolicy"):
                return answer
        raise ActorLost(self.role, dead)

    def _ended_rank(self) -> str | None:
        ended = ray.wait(self.following, timeout=0)[0] if self.following else []
        if not ended:
            return None
        rank = 1 + self.following.index(ended[0])
        return f"rank {rank} (pid {self.where[rank].pid}) ended"

    def _check_alive(self) -> None:
        pings = [actor.ping.remote() for actor in self.actors]
        ready, silent = ray.wait(pings, num_returns=len(pings), timeout=self.cfg.heartbeat)
        if silent:
            raise self._hung(
                f"gave no sign of life for {self.cfg.heartbeat:g} s (cluster.heartbeat)"
            )
        for ping in ready:
            self._get(ping, None)

    def _hung(self, how: str) -> ActorLost:
        """Ended by force: what hangs may hold a device."""
        pids = ", ".join(str(where.pid) for where in self.where)
        self.stop()
        self.fate = f"{how} (pid {pids or 'unknown'})"
        return ActorLost(self.role, self.fate)


_Actor: Any = ray.remote(concurrency_groups={"health": 2}, max_restarts=0, max_task_retries=0)(
    Actor
)


def _future(ref: Any) -> asyncio.Future[Any]:
    """To be awaited here; nobody is told of it if nobody does."""
    future = asyncio.wrap_future(ref.future())
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


def _reason(error: BaseException) -> str:
    """What Ray says of a death, in a line."""
    text = str(error)
    for mark in ("Worker exit detail: ", "The actor is dead because ", "Death reason: "):
        if mark in text:
            return (
                text.partition(mark)[2]
                .partition("\n")[0]
                .partition(" Some common causes")[0][:200]
                .strip()
            )
    return (text.strip().splitlines() or [type(error).__name__])[0][:200]


def _end(where: ActorAddress) -> None:
    """SIGKILL on the actor's machine; on one that is gone, nothing."""
    if where.node == ray.get_runtime_context().get_node_id():
        return kill_worker(where.pid)
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    if where.node in alive:
        there = NodeAffinitySchedulingStrategy(where.node, soft=False)
        with contextlib.suppress(RayError):
            ray.wait(
                [
                    ray.remote(kill_worker)
                    .options(num_cpus=0, scheduling_strategy=there)
                    .remote(where.pid)
                ],
                timeout=10.0,
            )


def kill_worker(pid: int) -> None:
    with contextlib.suppress(OSError):
        # and not somebody who got its number
        if b"ray::" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
