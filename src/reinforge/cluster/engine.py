"""An engine whose work is done by actors: the trainer's own, or several, each with a copy of the
weights or with servers that have one.

Requests of one moment travel together and are dealt over the replicas, each to the one that has
computed its beginning (engines/routing.py); answers come back as they are complete. A replica that
is lost is made again with the newest weights. Draws are keyed, so what it held can be asked again:
of the others at once, or of the new one where the last bits depend on what is computed together. So
is what an actor holds whose servers are gone, while it starts them again. Who heard of tokens as
they came is told of the loss, and asks for the rest.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from reinforge.cluster.backend import RemoteBackend, RemoteWeights
from reinforge.cluster.errors import ActorLost
from reinforge.cluster.mailbox import (
    Mailbox,
    MailboxNews,
    MailboxReply,
    MailboxRequest,
    ServersNotice,
)
from reinforge.cluster.ray_cluster import RayCluster
from reinforge.cluster.worker_group import WorkerGroup
from reinforge.core.engine import (
    Completion,
    Engine,
    EngineLost,
    OnTokens,
    Sampling,
    StreamingEngine,
)
from reinforge.core.weights import Weights
from reinforge.engines.routing import PrefixRouter
from reinforge.engines.served.dialect import ServerSetup
from reinforge.engines.served.engine import RESTARTS, ServedEngine

MAILBOX = "mailbox"
SendWeights = Callable[[WorkerGroup], Awaitable[dict[str, float]]]


@dataclass(slots=True, eq=False)
class SentRequests:
    """Requests that were sent to an actor together, and who waits for each. `RemoteEngine` keeps
    them until their replies are there.
    """

    requests: list[MailboxRequest]
    waiting: dict[int, asyncio.Future[Any]]

    @property
    def open(self) -> bool:
        return any(not future.done() for future in self.waiting.values())

    def unanswered(self) -> list[tuple[MailboxRequest, asyncio.Future[Any]]]:
        pairs = ((request, self.waiting[request.number]) for request in self.requests)
        return [(request, future) for request, future in pairs if not future.done()]


@dataclass(slots=True, eq=False)
class EngineReplica:
    """One actor that generates: what it was asked, and the task that collects its replies.
    `RemoteEngine` has one for each.
    """

    workers: WorkerGroup
    sent: list[SentRequests] = field(default_factory=list)
    collector: asyncio.Task[None] | None = None
    collectors: int = 0  # how many there were: the number of the newest
    failures: int = 0  # since the weights changed last
    lost: bool = False  # gone, and not there again
    without_server: float | None = None  # since when the actor lives and its servers do not
    repair: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def works(self) -> bool:
        """Whether what is sent there is computed at once."""
        return not self.lost and self.without_server is None

    @property
    def collected(self) -> bool:
        """Whether a task of the running event loop picks answers up."""
        task = self.collector
        here = asyncio.get_running_loop()
        return task is not None and not task.done() and task.get_loop() is here

    @property
    def load(self) -> int:
        return sum(r.named.get("n", 1) for p in self.sent for r, _ in p.unanswered())


class RemoteEngine:
    """`factory(objects, *args)` makes the engine in an actor, as object `name`.

    Colocated: `worker_groups` is the trainer's, alone; otherwise they are the engines' own,
    `workers(i)` of the cluster, and may be lost without the run being lost. `reroutes`: what a lost
    one held is asked of the others; otherwise it waits for the new one and is computed together
    with the same requests as before, to the bit. `served`: of the servers that the actors have in
    place of a module.
    """

    stats = None  # the actors do not tell

    def __init__(
        self,
        cluster: RayCluster,
        worker_groups: Sequence[Callable[[], WorkerGroup]],
        name: str,
        factory: Callable[..., Any],
        *args: Any,
        shares: bool,
        reroutes: bool = False,
        served: ServerSetup | None = None,
    ):
        self.cluster = cluster
        self.name = name
        self.shares = shares
        self.reroutes = reroutes
        self.served = served
        self.measured: Mapping[str, float] = {}  # of the newest update
        self.router = PrefixRouter()
        self._make_workers = list(worker_groups)
        self._factory = factory
        self._args = args
        self._numbers = itertools.count()
        self._gathered: list[tuple[MailboxRequest, asyncio.Future[Any]]] = []
        self._listeners: dict[int, OnTokens] = {}  # by the number of their request
        self._leaving: set[int] = set()  # requests that were cancelled and hear the last tokens
        self._probes = itertools.count()
        self._newest: SendWeights | None = None  # to an actor
        self._state: dict[str, int] | None = None
        # at the same time: each loads a model or starts a server
        with ThreadPoolExecutor(len(self._make_workers)) as starting:
            opened = starting.map(self._open, range(len(self._make_workers)))
            self.replicas = [EngineReplica(workers) for workers in opened]

    def _open(self, i: int) -> WorkerGroup:
        workers = self._make_workers[i]()
        workers.make(self.name, self._factory, *self._args)
        workers.make(MAILBOX, _mailbox, self.name, self.reroutes)
        return workers

    # ---- requests ----

    @property
    def streaming(self) -> StreamingEngine:
        return self

    async def generate(
        self,
        tokens: Sequence[int],
        params: Sampling,
        *,
        key: int,
        n: int = 1,
        on_tokens: OnTokens | None = None,
    ) -> list[Completion]:
        found: list[Completion] = await self._ask(
            "generate", (list(tokens), params), {"key": key, "n": n}, on_tokens
        )
        return found

    async def _ask(
        self,
        method: str,
        args: tuple[Any, ...],
        named: dict[str, Any],
        on_tokens: OnTokens | None = None,
    ) -> Any:
        loop = asyncio.get_running_loop()
        number = next(self._numbers)
        request = MailboxRequest(number, method, args, named, tells=on_tokens is not None)
        if on_tokens is not None:
            self._listeners[number] = on_tokens
        future = loop.create_future()
        if not self._gathered:
            # after everything else that is ready now: it may ask, too
            loop.call_soon(self._send_gathered)
        self._gathered.append((request, future))
        try:
            # not the future itself: who is cancelled still hears what there is
            await asyncio.wait({future})
            return future.result()
        except asyncio.CancelledError:
            await self._cancel(request, future)
            raise
        finally:
            self._listeners.pop(number, None)

    def _send_gathered(self) -> None:
        gathered = self._gathered
        self._gathered = []
        # not those that were cancelled before they were sent
        self._deal([(request, future) for request, future in gathered if not future.done()])

    def _deal(self, gathered: Sequence[tuple[MailboxRequest, asyncio.Future[Any]]]) -> None:
        """Sends each to one of the replicas; to those that are lost or have no server only if there
        is no other, and then it waits there.
        """
        parts: list[list[tuple[MailboxRequest, asyncio.Future[Any]]]] = [[] for _ in self.replicas]
        there = [i for i, r in enumerate(self.replicas) if r.works or not self.reroutes]
        loads = {i: self.replicas[i].load for i in there or range(len(self.replicas))}
        for request, future in gathered:
            prompt = request.args[0]
            i = self.router.place(prompt, loads)
            self.router.add(prompt, i)
            parts[i].append((request, future))
            loads[i] += request.named.get("n", 1)
        for replica, part in zip(self.replicas, parts, strict=True):
            if part or replica.without_server is not None:
                self._hand_over(replica, part)

    def _hand_over(
        self, replica: EngineReplica, part: Sequence[tuple[MailboxRequest, asyncio.Future[Any]]]
    ) -> None:
        """Sends it these, and sees to it that somebody of this event loop picks replies up: of one
        without servers also the news that it has some again.
        """
        collected = replica.collected
        if not collected:
            replica.collectors += 1
        if part:
            batch = SentRequests(
                [request for request, _ in part],
                {request.number: future for request, future in part},
            )
            replica.sent.append(batch)
            self._submit(replica, [batch])
        if not collected:
            replica.collector = asyncio.get_running_loop().create_task(self._collect(replica))

    def _submit(self, replica: EngineReplica, batches: Sequence[SentRequests]) -> None:
        for batch in batches:
            replica.workers.send(MAILBOX, "submit", batch.requests, replica.collectors)

    async def _cancel(self, request: MailboxRequest, future: asyncio.Future[Any]) -> None:
        """Who hears of its tokens hears the last of them."""
        sent = False
        for replica in self.replicas:
            if any(request.number in batch.waiting for batch in replica.sent):
                replica.workers.send(MAILBOX, "cancel", [request.number])
                sent = True
        try:
            if sent and request.tells:
                self._leaving.add(request.number)
                await asyncio.wait({future})
        finally:
            self._leaving.discard(request.number)
            future.cancel()
            _seen(future)

    async def _collect(self, replica: EngineReplica) -> None:
        """Picks answers up while anybody waits for some, or for its servers."""
        while replica.sent or replica.without_server is not None:
            try:
                for answer in (
                    await self._with_recovery(
                        replica,
                        lambda workers: workers.acall(
                            MAILBOX, "take", self.cluster.cfg.heartbeat, replica.collectors
                        ),
                    )
                    or ()
                ):
                    if isinstance(answer, ServersNotice):
                        self._note_servers(replica, answer)
                    else:
                        self._settle(replica, answer)
            except Exception as error:
                return self._fail(replica, error)
            replica.sent = [batch for batch in replica.sent if batch.open]

    def _settle(self, replica: EngineReplica, answer: MailboxReply | MailboxNews) -> None:
        if isinstance(answer, MailboxNews):
            if (listener := self._listeners.get(answer.number)) is not None:
                listener(answer.place, answer.new)
            return
        for batch in replica.sent:
            for request, future in batch.unanswered():
                if request.number != answer.number:
                    continue
                if answer.error is not None:
                    future.set_exception(replica.workers.cause(answer.error))
                    continue
                future.set_result(answer.value)
                for completion in answer.value or ():
                    self.router.add(
                        [*request.args[0], *completion.tokens], self.replicas.index(replica)
                    )

    def _fail(self, replica: EngineReplica, error: Exception) -> None:
        """Nobody is left waiting for ever."""
        sent = replica.sent
        replica.sent = []
        for future in (
            future for batch in sent for future in batch.waiting.values() if not future.done()
        ):
            future.set_exception(error)

    # ---- a lost replica ----

    async def _with_recovery(
        self, replica: EngineReplica, work: Callable[[WorkerGroup], Awaitable[Any]]
    ) -> Any:
        """What the replica's actor answers; None where it was lost, and is there again."""
        workers = replica.workers
        try:
            return await work(workers)
        except ActorLost as lost:
            async with replica.repair:
                if replica.workers is workers:  # nobody else has done it
                    await self._recover(replica, lost)
        return None

    async def _recover(self, replica: EngineReplica, lost: ActorLost) -> None:
        """A new actor in the same place, with the weights of the others; then everything that was
        sent to the old one since it had nothing to do, in the same order: what it computes together
        is then the same, too. The answers that are known are not told twice. Where requests are
        rerouted, nothing is left to be sent.
        """
        if self.shares:
            raise lost  # the trainer is gone with it
        began = time.monotonic()
        self.cluster.note("actor_lost", role=lost.role, how=lost.how)
        replica.lost = True
        self._tell_listeners(replica)
        self._reroute(replica)
        replica.failures += 1
        if replica.failures > self.cluster.cfg.restarts:
            raise ActorLost(
                lost.role,
                f"lost {replica.failures} times without a step in between;"
                f" the last time: {lost.how}",
            )
        replica.workers = await asyncio.to_thread(
            self._replace, self.replicas.index(replica), replica.workers
        )
        if self._newest is not None:
            await self._newest(replica.workers)
        replica.lost = False
        replica.without_server = None
        replica.sent = [batch for batch in replica.sent if batch.open]
        self._submit(replica, replica.sent)
        held = sum(not future.done() for batch in replica.sent for future in batch.waiting.values())
        self.cluster.note(
            "actor_restored", role=lost.role, seconds=time.monotonic() - began, asked_again=held
        )

    def _tell_listeners(self, replica: EngineReplica) -> None:
        """They know what there is of their answers, and ask for the rest; or they have left."""
        held = [
            (request, future)
            for batch in replica.sent
            for request, future in batch.unanswered()
            if request.tells
        ]
        role = replica.workers.role
        going_on = 0
        for request, future in held:
            if request.number in self._leaving:
                future.set_result(None)
            else:
                going_on += 1
                future.set_exception(EngineLost(role))
        if going_on:
            self.cluster.note("requests_rerouted", role=role, requests=going_on)
        replica.sent = [batch for batch in replica.sent if batch.open]

    def _reroute(self, replica: EngineReplica) -> None:
        """What it held goes to the others, now: a new one, or its new servers, have a model to
        load. Where there are no others, or the same requests are to be computed together again, it
        waits.
        """
        if not self.reroutes:
            return
        self.router.forget(self.replicas.index(replica))
        if not any(r.works for r in self.replicas):
            return
        if not replica.lost:
            held = [request.number for batch in replica.sent for request, _ in batch.unanswered()]
            replica.workers.send(MAILBOX, "cancel", held)
        self._tell_listeners(replica)
        left = [pair for batch in replica.sent for pair in batch.unanswered()]
        replica.sent = []
        if left:
            self.cluster.note("requests_rerouted", role=replica.workers.role, requests=len(left))
            self._deal(left)

    def _note_servers(self, replica: EngineReplica, notice: ServersNotice) -> None:
        """The actor lives, and has no server left; or has one again."""
        role = replica.workers.role
        since = replica.without_server
        if notice.serving and since is not None:
            replica.without_server = None
            self.cluster.note("servers_restored", role=role, seconds=time.monotonic() - since)
        elif not notice.serving and since is None:
            replica.without_server = time.monotonic()
            self.cluster.note("servers_lost", role=role)
            self._reroute(replica)

    def _replace(self, i: int, old: WorkerGroup) -> WorkerGroup:
        old.stop()
        self.cluster.worker_groups.pop(old.role, None)
        workers = self._open(i)
        if self._state is not None:
            workers.call(self.name, "load", self._state)
        return workers

    # ---- weights ----

    async def update(self, weights: Weights, version: int) -> None:
        assert isinstance(weights, RemoteWeights) and weights.source is not None, (
            "weights that are not in an actor cannot be sent to one"
        )
        source: RemoteBackend = weights.source
        self.router.forget()  # the caches are dropped
        if self.shares:
            return await self.replicas[0].workers.acall(MAILBOX, "update", source.name, version)
        self._newest = await self._publish(source, version)
        for replica in self.replicas:
            replica.failures = 0
        self.measured = _together(await self._each(self._newest))

    async def _publish(self, source: RemoteBackend, version: int) -> SendWeights:
        """The newest weights in the object store, and how an actor gets them from there."""
        if self.served is None:
            refs, mark = await source.workers.ask("publish", source.name)
            return lambda workers: workers.ask("receive", self.name, refs, mark, version)
        number = next(self._probes)
        sent, _ = await source.workers.ask("publish_served", source.name, self.served, number)
        return lambda workers: workers.ask("receive_served", self.name, sent, version)

    # ---- the rest of the contract ----

    async def sleep(self) -> None:
        await self._each(lambda workers: workers.acall(self.name, "sleep"))

    async def _each(self, work: Callable[[WorkerGroup], Awaitable[Any]]) -> list[Any]:
        works = (self._with_recovery(replica, work) for replica in self.replicas)
        return list(await asyncio.gather(*works))

    def state(self) -> dict[str, int]:
        """Of any that is there: they are alike. Where none is, what they had."""
        for replica in self.replicas:
            try:
                self._state = replica.workers.call(self.name, "state")
                break
            except ActorLost:
                if self.shares:
                    raise  # the trainer is gone with it
        return dict(self._state or {})

    def load(self, state: dict[str, int]) -> None:
        self._state = dict(state)
        for replica in self.replicas:
            replica.workers.call(self.name, "load", self._state)

    def close(self) -> None:
        """The actors end with the cluster."""


def _together(found: Sequence[Mapping[str, float] | None]) -> dict[str, float]:
    """What replicas measured, as if they were one: the worst of each, and all restarts.

    >>> _together([{"weights/seconds": 2.0, "engine/restarts": 1.0}, None, {"engine/restarts": 2}])
    {'engine/restarts': 3.0, 'weights/seconds': 2.0}
    """
    told = [measured for measured in found if measured]  # not by one that was lost meanwhile
    names = sorted({name for measured in told for name in measured})
    by_name = {name: [measured[name] for measured in told if name in measured] for name in names}
    return {
        name: sum(values) if name == RESTARTS else max(values) for name, values in by_name.items()
    }


def _seen(future: asyncio.Future[Any]) -> None:
    """Nobody is told of its error."""
    if future.done() and not future.cancelled():
        future.exception()


# ---- in the actor ----


class SharedMailbox(Mailbox):
    """The mailbox of an engine in the trainer's actor: it takes the weights from the backend there,
    in place.
    """

    def __init__(self, engine: Engine, objects: dict[str, Any]):
        super().__init__(engine)
        self.objects = objects

    async def update(self, backend: str, version: int) -> None:
        await self.engine.update(self.objects[backend].weights(), version)


def _mailbox(objects: dict[str, Any], name: str, reroutes: bool) -> Mailbox:
    engine = objects[name]
    made = SharedMailbox(engine, objects)
    if reroutes and isinstance(engine, ServedEngine):
        engine.on_serving = made.note_servers
    return made
