"""An engine whose work is done by actors: the trainer's own, or several with a copy of the weights
each.

Requests of one moment travel together and are dealt over the seats; answers come back as they are
complete. A seat that is lost is made again with the newest weights, and what it held is asked
again: draws are keyed, so the samples are the same.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reinforge.cluster.backend import RemoteBackend, RemoteWeights
from reinforge.cluster.crew import Crew, Lost
from reinforge.cluster.desk import Answered, Desk, Request
from reinforge.cluster.group import Cluster
from reinforge.core.engine import Completion, Engine, Sampling
from reinforge.core.weights import Weights

DESK = "desk"


@dataclass(slots=True, eq=False)
class Parcelled:
    """Requests that were sent together, and who waits for them."""

    requests: list[Request]
    waiting: dict[int, asyncio.Future[Any]]

    @property
    def open(self) -> bool:
        return any(not future.done() for future in self.waiting.values())


@dataclass(slots=True, eq=False)
class Seat:
    """One actor that generates: what it was asked, and the task that picks its answers up."""

    crew: Crew
    sent: list[Parcelled] = field(default_factory=list)
    collector: asyncio.Task[None] | None = None
    failures: int = 0  # since the weights changed last
    repair: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def load(self) -> int:
        return sum(
            r.named.get("n", 1)
            for p in self.sent
            for r in p.requests
            if not p.waiting[r.number].done()
        )


class RemoteEngine:
    """`factory(objects, *args)` makes the engine in an actor, as object `name`.

    Colocated: `crews` is the trainer's, alone; otherwise they are the engines' own, `crew(i)` of
    the cluster, and may be lost without the run being lost.
    """

    stats = None  # the actors do not tell
    measured: Mapping[str, float] = {}

    def __init__(
        self,
        cluster: Cluster,
        crews: Sequence[Callable[[], Crew]],
        name: str,
        factory: Callable[..., Any],
        *args: Any,
        shares: bool,
    ):
        self.cluster = cluster
        self.name = name
        self.shares = shares
        self._crews = list(crews)
        self._factory = factory
        self._args = args
        self._numbers = itertools.count()
        self._gathered: list[tuple[Request, asyncio.Future[Any]]] = []
        self._published: tuple[Any, str, int] | None = None  # references, fingerprint, version
        self._state: dict[str, int] | None = None
        self.seats = [Seat(self._open(i)) for i in range(len(self._crews))]

    def _open(self, i: int) -> Crew:
        crew = self._crews[i]()
        crew.make(self.name, self._factory, *self._args)
        crew.make(DESK, _desk, self.name)
        return crew

    # ---- requests ----

    async def generate(
        self, tokens: Sequence[int], params: Sampling, *, key: int, n: int = 1
    ) -> list[Completion]:
        found: list[Completion] = await self._ask(
            "generate", (list(tokens), params), {"key": key, "n": n}
        )
        return found

    async def _ask(self, method: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        loop = asyncio.get_running_loop()
        request = Request(next(self._numbers), method, args, named)
        future = loop.create_future()
        if not self._gathered:
            # after everything else that is ready now: it may ask, too
            loop.call_soon(self._send_gathered)
        self._gathered.append((request, future))
        try:
            return await future
        except asyncio.CancelledError:
            self._cancel(request)
            raise

    def _send_gathered(self) -> None:
        gathered = self._gathered
        self._gathered = []
        parts: list[list[tuple[Request, asyncio.Future[Any]]]] = [[] for _ in self.seats]
        loads = [seat.load for seat in self.seats]
        for request, future in gathered:
            if future.done():  # cancelled before it was sent
                continue
            i = loads.index(min(loads))
            parts[i].append((request, future))
            loads[i] += request.named.get("n", 1)
        for seat, part in zip(self.seats, parts, strict=True):
            if part:
                parcel = Parcelled(
                    [request for request, _ in part],
                    {request.number: future for request, future in part},
                )
                seat.sent.append(parcel)
                self._submit(seat, [parcel])
                if seat.collector is None or seat.collector.done():
                    seat.collector = asyncio.get_running_loop().create_task(self._collect(seat))

    def _submit(self, seat: Seat, parcels: Sequence[Parcelled]) -> None:
        for parcel in parcels:
            seat.crew.send(DESK, "submit", parcel.requests)

    def _cancel(self, request: Request) -> None:
        for seat in self.seats:
            if any(request.number in parcel.waiting for parcel in seat.sent):
                seat.crew.send(DESK, "cancel", [request.number])

    async def _collect(self, seat: Seat) -> None:
        """Picks answers up while anybody waits for some."""
        while seat.sent:
            try:
                for answer in (
                    await self._kept(
                        seat, lambda crew: crew.acall(DESK, "take", self.cluster.cfg.heartbeat)
                    )
                    or ()
                ):
                    self._settle(seat, answer)
            except Exception as error:
                return self._fail(seat, error)
            seat.sent = [parcel for parcel in seat.sent if parcel.open]

    def _settle(self, seat: Seat, answer: Answered) -> None:
        for parcel in seat.sent:
            future = parcel.waiting.get(answer.number)
            if future is not None and not future.done():
                if answer.error is not None:
                    future.set_exception(answer.error)
                else:
                    future.set_result(answer.value)

    def _fail(self, seat: Seat, error: Exception) -> None:
        """Nobody is left waiting for ever."""
        sent = seat.sent
        seat.sent = []
        for future in (
            future for parcel in sent for future in parcel.waiting.values() if not future.done()
        ):
            future.set_exception(error)

    # ---- a lost seat ----

    async def _kept(self, seat: Seat, work: Callable[[Crew], Awaitable[Any]]) -> Any:
        """What the seat's crew answers; None where it was lost, and is there again."""
        crew = seat.crew
        try:
            return await work(crew)
        except Lost as lost:
            async with seat.repair:
                if seat.crew is crew:  # nobody else has done it
                    await self._again(seat, lost)
        return None

    async def _again(self, seat: Seat, lost: Lost) -> None:
        """A new actor in the same place, with the weights of the others; then everything that was
        sent to the old one since it had nothing to do, in the same order: what it computes together
        is then the same, too. The answers that are known are not told twice.
        """
        if self.shares:
            raise lost  # the trainer is gone with it
        began = time.monotonic()
        self.cluster.note("actor_lost", role=lost.role, how=lost.how)
        seat.failures += 1
        if seat.failures > self.cluster.cfg.restarts:
            raise Lost(
                lost.role,
                f"lost {seat.failures} times without a step in between; the last time: {lost.how}",
            )
        seat.crew = await asyncio.to_thread(self._replace, self.seats.index(seat), seat.crew)
        if self._published is not None:
            await seat.crew.ask("receive", self.name, *self._published)
        seat.sent = [parcel for parcel in seat.sent if parcel.open]
        self._submit(seat, seat.sent)
        held = sum(not future.done() for parcel in seat.sent for future in parcel.waiting.values())
        self.cluster.note(
            "actor_restored", role=lost.role, seconds=time.monotonic() - began, asked_again=held
        )

    def _replace(self, i: int, old: Crew) -> Crew:
        old.stop()
        self.cluster.crews.pop(old.role, None)
        crew = self._open(i)
        if self._state is not None:
            crew.call(self.name, "load", self._state)
        return crew

    # ---- weights ----

    async def update(self, weights: Weights, version: int) -> None:
        assert isinstance(weights, RemoteWeights) and weights.source is not None, (
            "weights that are not in an actor cannot be sent to one"
        )
        source: RemoteBackend = weights.source
        if self.shares:
            return await self.seats[0].crew.acall(DESK, "update", source.name, version)
        refs, mark = await source.crew.ask("publish", source.name)
        self._published = published = (refs, mark, version)
        for seat in self.seats:
            seat.failures = 0
        await self._each(lambda crew: crew.ask("receive", self.name, *published))

    # ---- the rest of the contract ----

    async def sleep(self) -> None:
        await self._each(lambda crew: crew.acall(self.name, "sleep"))

    async def _each(self, work: Callable[[Crew], Awaitable[Any]]) -> None:
        await asyncio.gather(*(self._kept(seat, work) for seat in self.seats))

    def state(self) -> dict[str, int]:
        state: dict[str, int] = self.seats[0].crew.call(self.name, "state")
        self._state = state
        return state

    def load(self, state: dict[str, int]) -> None:
        self._state = dict(state)
        for seat in self.seats:
            seat.crew.call(self.name, "load", self._state)

    def close(self) -> None:
        """The actors end with the cluster."""


# ---- in the actor ----


class SharedDesk(Desk):
    """A desk beside the trainer: its engine takes the weights from the backend, where they are."""

    def __init__(self, engine: Engine, objects: dict[str, Any]):
        super().__init__(engine)
        self.objects = objects

    async def update(self, backend: str, version: int) -> None:
        await self.engine.update(self.objects[backend].weights(), version)


def _desk(objects: dict[str, Any], name: str) -> Desk:
    return SharedDesk(objects[name], objects)
