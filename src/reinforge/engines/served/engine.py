"""An engine that lives in servers: the contract over one or several replicas of a server.

A request goes to the replica that has computed its beginning (engines/routing.py), a new prompt to
the one with least to do. What a dead replica held is sent to another: from its beginning, with the
same draws, or from the tokens that were told, where somebody hears them as they come. The dead one
is started again and gets the current weights before it gets work. An update is staged everywhere
while generation goes on, then what runs is interrupted, the new weights are committed, proved with
a probe, and the interrupted samples go on under them: every token says which weights drew it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from reinforge.config.engine import SERVERS
from reinforge.core.engine import (
    Completion,
    GenerationStats,
    NewTokens,
    OnTokens,
    Sampling,
    StreamingEngine,
)
from reinforge.core.errors import InputError
from reinforge.core.gpu_room import Release, nothing_to_release
from reinforge.core.routes import RoutedLayers
from reinforge.core.sample import Stop
from reinforge.core.seeds import seed_of
from reinforge.core.weights import Weights
from reinforge.engines.routing import PrefixRouter
from reinforge.engines.served.dialect import Dialect, SampleOutput, SampleRequest, ServerSetup
from reinforge.engines.served.http import ServerClient, ServerDown, ServerFault
from reinforge.engines.served.replica import Replica
from reinforge.engines.served.transfer import WeightTransfer
from reinforge.engines.served.turns import MemoryTurns
from reinforge.weights.probe import Scorer

T = TypeVar("T")
RESENDS = 4  # of one request, to replicas that die of it
STARTS = 3  # of one replica, that fail one after the other
RESTARTS = "engine/restarts"  # a metric


@dataclass(slots=True)
class SampleInProgress:
    """One sample on its way, across interruptions. `ServedEngine.generate` makes one for each
    completion, asks for the rest of it until it is whole, and returns what it has gathered.
    """

    index: int
    on_tokens: OnTokens | None = None  # hears of its tokens
    done: Completion = field(default_factory=lambda: Completion([], [], [], Stop.LENGTH))
    open: bool = True

    def request(self, prompt: list[int], key: int, limit: int, seeded: bool) -> SampleRequest:
        """For what is missing."""
        at = len(self.done.tokens)
        seed = None
        if seeded:
            seed = seed_of(key, self.index, at) if at else seed_of(key, self.index)
        return SampleRequest(prompt + self.done.tokens, seed, limit - at)

    def take(
        self,
        output: SampleOutput,
        version: int,
        limit: int,
        stops: frozenset[int],
        routed: RoutedLayers | None = None,
    ) -> None:
        """The next part of it. What was interrupted is read again with the rest: the newest routes
        are those of the whole sample.
        """
        done = self.done
        done.tokens.extend(output.tokens)
        done.logprobs.extend(output.logprobs)
        drawn = [version] * len(output.tokens)
        for at, newer in output.cuts:
            drawn[at:] = [newer] * (len(drawn) - at)
        done.versions.extend(drawn)
        routes = None
        if routed is not None and output.routes is not None:
            routes = routed.of(output.routes)
        stopped = bool(output.tokens) and output.tokens[-1] in stops
        self.open = output.reason == "abort" and not stopped and len(self.done.tokens) < limit
        stop = Stop.EOS if stopped or output.reason == "stop" else done.stop
        self.done = Completion(done.tokens, done.logprobs, done.versions, stop, routes)
        if self.on_tokens is not None and (drawn or not self.open):
            whole = None if self.open else self.done
            new = NewTokens(output.tokens, output.logprobs, drawn, whole)
            self.on_tokens(self.index, new)


class EventLoopState:
    """What belongs to one event loop: the gate that an update closes, and the work of bringing
    replicas up. `ServedEngine` makes a new one when it finds itself in another loop.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.gate = asyncio.Event()
        self.gate.set()
        # weights on their way: an update, or those of a replica that comes back; servers have room
        # for one
        self.moving = asyncio.Lock()
        self.starting = asyncio.Lock()  # of servers that share a GPU: one after the other
        self.tasks: dict[str, asyncio.Task[Any]] = {}

    async def once(self, name: str, make: Awaitable[Any]) -> None:
        """The same work for everybody who asks for it now.

        Who stops waiting does not stop it for the others.
        """
        task = self.tasks.get(name)
        if task is None or task.done():
            task = self.tasks[name] = asyncio.ensure_future(make)  # type: ignore[assignment]
        else:
            make.close()  # type: ignore[attr-defined]
        await asyncio.shield(task)


class ServedEngine:
    """An `Engine` over servers in processes of their own. `make_served` makes it; rollouts ask it,
    and the loop updates it, as any other. What is particular to a kind of server is its `Dialect`.
    """

    def __init__(
        self,
        setup: ServerSetup,
        dialect: Dialect,
        score: Scorer | None = None,
        release: Release = nothing_to_release,
    ):
        """Starts the servers; they are waited for when they are needed.

        `score`: the trainer's own log-probs, for the proof of an update. `release`: empties the
        allocators of all trainers on the servers' GPUs.
        """
        self.setup = setup
        self.dialect = dialect
        self.stop_tokens = frozenset(setup.stop_tokens)
        self.version = 0
        self.stats = GenerationStats()
        self.measured: dict[str, float] = {}  # of the newest update, for the step's metrics
        self.restarts = 0
        self.asleep = 0  # the level at which they sleep
        # told when no server is left, and whenever one serves again: who has other engines may ask
        # these meanwhile
        self.on_serving: Callable[[bool], None] | None = None
        self._waiting = 0
        self._since = 0.0
        self.replicas = [
            Replica(i, setup, dialect) for i in range(len(setup.cfg.address) or setup.cfg.replicas)
        ]
        self.transfer = WeightTransfer(setup, dialect, score)
        self.memory = MemoryTurns(release)
        self.router = PrefixRouter()
        self._state: EventLoopState | None = None
        for replica in self.replicas[: 1 if setup.in_turn else None]:
            replica.start()

    def _here(self) -> EventLoopState:
        if self._state is None or self._state.loop is not asyncio.get_running_loop():
            self._state = EventLoopState()
            for replica in self.replicas:
                replica.load = 0  # what another loop was waiting for went with it
        return self._state

    # ---- the contract ----

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
        prompt = list(tokens)
        limit = params.max_new_tokens
        if not prompt:
            raise InputError(
                "an empty prompt has nothing to continue.",
                fix="Give at least one token, e.g. the BOS token.",
            )
        if len(prompt) + limit > self.setup.context:
            raise InputError(
                f"prompt of {len(prompt)} tokens + max_new_tokens {limit} is past the model's"
                f" context of {self.setup.context}.",
                where="rollout.max_new_tokens",
                fix=(
                    "Set fewer new tokens (reinforge generate: --max-new-tokens), or shorten the"
                    " prompt with data.length."
                ),
            )
        refuse_what_it_cannot(self.setup.kind, params)
        stops = (
            frozenset() if params.ignore_eos else self.stop_tokens | frozenset(params.stop_tokens)
        )
        if params.constraint is not None:
            assert on_tokens is None, "a server begins a grammar at its beginning, never inside"
        drafts = [SampleInProgress(i, on_tokens) for i in range(n)]
        self._begin()
        try:
            while waiting := [d for d in drafts if d.open]:
                await self._advance(waiting, prompt, params, stops, key)
                if params.constraint is not None:
                    drafts = [SampleInProgress(d.index) if d.open else d for d in drafts]
        finally:
            self._finish()
            self.stats.prompt_tokens += len(prompt)
            self.stats.generated_tokens += sum(len(d.done.tokens) for d in drafts)
        return [d.done for d in drafts]

    def _begin(self) -> None:
        """Seconds are counted while anybody waits for anything, once."""
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting += 1

    def _finish(self) -> None:
        self._waiting -= 1
        if not self._waiting:
            self.stats.seconds += time.monotonic() - self._since

    async def update(self, weights: Weights, version: int) -> None:
        """Old or new, never mixed: what was published before stays until every replica has proved
        the new one.
        """
        here = self._here()
        start = time.monotonic()
        if not self.asleep:
            await self._all_up()  # who starts looks at what is free
        # in a thread: what is being generated goes on. Who sleeps goes on sleeping, so that the
        # trainer has its memory for the gather and for its side of the proof
        fresh = await asyncio.to_thread(self.transfer.publish, weights, version)
        try:
            await self._awake()
            await self._all_up()
        except BaseException:
            fresh.channel.close()
            raise
        async with here.moving:
            up = [(r, r.life) for r in self.replicas if r.up]
            await asyncio.gather(*(self._or_lost(r, self.transfer.stage(r, fresh)) for r, _ in up))
            here.gate.clear()
            try:
                if self.setup.cfg.running == "interrupt":
                    await self._quiet()
                # who died and is up again has nothing staged
                staged = [r for r, life in up if r.up and r.life == life]
                checks = await asyncio.gather(
                    *(self._or_lost(r, self.transfer.commit(r, fresh)) for r in staged)
                )
                self.version = version
                self.router.forget()  # the caches are empty
                self.transfer.keep(fresh)
            except BaseException:
                fresh.channel.close()
                for replica, _ in up:
                    # it serves the one or the other, nobody knows: started again, it gets what was
                    # served before
                    replica.stop()
                raise
            finally:
                here.gate.set()
        if not any(r.version == version for r in self.replicas):
            await self._free()  # all of them died of it: the first that is back proves it
        errors = [check.error for check in checks if check is not None]
        self.measured = {
            "weights/seconds": time.monotonic() - start,
            RESTARTS: float(self.restarts),
        }
        self.measured |= {"weights/probe_error": max(errors)} if errors else {}

    async def sleep(self) -> None:
        assert not any(r.load for r in self.replicas), (
            "cannot sleep while completions are being written"
        )
        level = (
            self.setup.sleep_level
            if self.transfer.published is not None
            else min(1, self.setup.sleep_level)
        )
        if level and not self.asleep:
            await self.memory.give(self._each(lambda http: self.dialect.sleep(http, level)))
            self.asleep = level
            self.router.forget()
            if level == 2:
                for replica in self.replicas:
                    replica.version = None  # its weights are gone

    def state(self) -> dict[str, int]:
        return {}

    def load(self, state: dict[str, int]) -> None:
        """A server schedules by the clock; nothing of it could be repeated."""

    def close(self) -> None:
        for replica in self.replicas:
            replica.stop()
        self.transfer.close()

    # ---- sending ----

    async def _advance(
        self,
        drafts: Sequence[SampleInProgress],
        prompt: list[int],
        params: Sampling,
        stops: frozenset[int],
        key: int,
    ) -> None:
        """Takes somebody's answer to what is missing.

        The gate is looked at last: nothing is sent into an update.
        """
        limit = params.max_new_tokens
        seeded = self.setup.cfg.seeded
        problem: Exception | None = None
        for _ in range(RESENDS):
            # again each time: a replica that died may have told some of it
            drafts = [d for d in drafts if d.open]
            requests = [d.request(prompt, key, limit, seeded) for d in drafts]
            if not requests:
                return
            # what they all begin with; those of one prompt, where nothing was written yet
            shared = requests[0].tokens
            replica = await self._free(shared)
            self.router.add(shared, replica.index)
            replica.load += len(requests)
            version = self.version
            life = replica.life
            take = partial(self._take, drafts, version, limit, stops)
            heard = take if drafts[0].on_tokens is not None else None
            try:
                outputs = await self._watched(
                    replica, self.dialect.generate(_of(replica), requests, params, stops, heard)
                )
                for i, output in enumerate(outputs):
                    take(i, output)
                    if version == self.version:
                        self.router.add([*prompt, *drafts[i].done.tokens], replica.index)
                return
            except ServerDown as error:
                problem = error
                if replica.life == life and replica.up and await replica.healthy(0.0):
                    if isinstance(error, ServerFault):
                        # it generates: the request is what is wrong
                        raise RuntimeError(str(error)) from error
                    continue  # it was the connection
                self._lost(replica, life)
            finally:
                replica.load -= len(requests)
        raise RuntimeError(f"{RESENDS} replicas died over the same request: {problem}")

    def _take(
        self,
        drafts: Sequence[SampleInProgress],
        version: int,
        limit: int,
        stops: frozenset[int],
        i: int,
        output: SampleOutput,
    ) -> None:
        drafts[i].take(output, version, limit, stops, self.setup.routed)

    async def _watched(self, replica: Replica, work: Awaitable[T]) -> T:
        """The answer, or ServerDown once the replica no longer generates."""
        every = self.setup.cfg.health_seconds
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=every)
                if not task.done() and not (replica.up and await replica.healthy(every)):
                    raise ServerDown(f"replica {replica.index} generates nothing any more")
            return task.result()
        finally:
            task.cancel()

    async def _free(self, tokens: Sequence[int] = ()) -> Replica:
        """The replica for these tokens among those that serve the current weights, once the gate is
        open and they are awake.
        """
        while True:
            here = self._here()
            await here.gate.wait()
            await self._awake()
            serving = [r for r in self.replicas if r.up and r.version == self.version]
            rising = [r for r in self.replicas if r not in serving and r.failures < STARTS]
            works = [
                asyncio.ensure_future(here.once(f"rise {r.index}", self._rise(r))) for r in rising
            ]
            for work in works:
                # seen: an error is told below
                work.add_done_callback(lambda done: done.cancelled() or done.exception())
            if serving:
                if here.gate.is_set() and not self.asleep:
                    place = self.router.place(tokens, {r.index: r.load for r in serving})
                    return self.replicas[place]
                continue
            if not works:
                words = next((r.last_words for r in self.replicas if r.last_words), "")
                raise RuntimeError(
                    f"no replica is left: each failed {STARTS} times; see"
                    f" {self.setup.log('*')}\n{words}"
                )
            done, _ = await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
            for work in done:
                work.result()

    # ---- life and death ----

    def _lost(self, replica: Replica, life: int) -> None:
        """It is gone, or must go: whatever it still does, nobody waits for it.

        The first of many who notice ends it.
        """
        if replica.life == life and (replica.up or replica.process is not None):
            replica.stop()
            self.router.forget(replica.index)
            self.restarts += 1
            if self.on_serving is not None and not any(r.up for r in self.replicas):
                self.on_serving(False)
                # whoever waits here may leave: one is brought back all the same
                back = asyncio.ensure_future(self._here().once("back", self._free()))
                back.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _or_lost(self, replica: Replica, work: Awaitable[T]) -> T | None:
        """What the replica answers; None, and the replica lost, where it died of it.

        What it says is wrong is raised.
        """
        life = replica.life
        try:
            return await work
        except ServerDown as error:
            if self.setup.cfg.address or isinstance(error, ServerFault):
                raise
            self._lost(replica, life)
            return None

    async def _rise(self, replica: Replica) -> None:
        """Up, and serving the current weights."""
        try:
            if not replica.up:
                async with self._here().starting if self.setup.in_turn else nullcontext():
                    if replica.process is None or not replica.process.alive:
                        replica.start()
                    await replica.ready()
            async with self._here().moving:
                current = self.transfer.published
                if current is None:
                    replica.version = self.version
                elif replica.version != current.version:
                    await self.transfer.stage(replica, current)
                    await self.transfer.commit(replica, current)
            replica.failures = 0
            if self.on_serving is not None:
                self.on_serving(True)
        except (ServerDown, InputError) as error:
            replica.failures += 1
            replica.stop()
            if replica.failures >= STARTS or self.restarts == 0 or isinstance(error, ServerFault):
                raise

    async def _all_up(self) -> None:
        """Brings everybody up who can be; at least one."""
        here = self._here()
        rising = [
            here.once(f"rise {r.index}", self._rise(r))
            for r in self.replicas
            if not r.up and r.failures < STARTS
        ]
        results = await asyncio.gather(*rising, return_exceptions=True)
        up = [r for r in self.replicas if r.up]
        # at the start nothing may be missing
        if not up or (self.transfer.published is None and len(up) < len(self.replicas)):
            raise next(
                (r for r in results if isinstance(r, BaseException)),
                RuntimeError("no replica is up"),
            )

    async def _quiet(self) -> None:
        """Interrupts everything until nothing is under way.

        What is sent late is interrupted in the next round.
        """
        while busy := [r for r in self.replicas if r.load and r.up]:
            await asyncio.gather(*(self._or_lost(r, self.dialect.abort(_of(r))) for r in busy))
            await asyncio.sleep(0.01)

    async def _awake(self) -> None:
        """Wakes whoever sleeps.

        Weights that were dropped come back with an update, or when the next request finds them
        missing.
        """
        if self.asleep:
            await self._here().once("wake", self._wake_all())

    async def _wake_all(self) -> None:
        await self.memory.take()
        await self._each(lambda http: self.dialect.wake(http, self.asleep))
        self.asleep = 0

    async def _each(self, ask: Callable[[ServerClient], Awaitable[None]]) -> None:
        """The same of all servers that are up, at the same time."""
        up = [r for r in self.replicas if r.up]
        await asyncio.gather(*(self._or_lost(r, ask(_of(r))) for r in up))


def refuse_what_it_cannot(server: str, params: Sampling) -> None:
    """So that no dialect has to: what `ServerFacts` says about a kind of server."""
    facts = SERVERS[server]
    if params.filtered and not facts.filters:
        raise InputError(
            f"{server} knows no top_p, top_k and min_p.",
            where="rollout.engine",
            fix="Leave them out, or use another engine.",
        )
    if params.stop_strings and not params.ignore_eos and not facts.stop_strings:
        raise InputError(
            f"{server} stops at tokens, not at strings.",
            where="rollout.engine",
            fix="Leave the stop strings out, or use another engine.",
        )

    if params.constraint is not None and not facts.structured:
        raise InputError(
            f"{server} knows no answers of a given form.",
            where="rollout.engine",
            fix="Leave the constraint out, or use another engine.",
        )


def _of(replica: Replica) -> ServerClient:
    assert replica.http is not None
    return replica.http
