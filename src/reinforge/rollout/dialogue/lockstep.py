"""Agents in step: so that what the engine computes at the same time does not depend on whose
request came first.

On most hardware the last bits of a result depend on what else is in the batch. With lockstep the
batches are a function of what the agents ask, not of when: a run that is done again comes out the
same. The price: all wait for the slowest.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

# seconds without a change before a wave starts: an agent that ended may make room for another
SETTLE = 0.005


class Lockstep:
    """Makes the requests of agents come in an order that does not depend on the clock: they wait
    until every running agent waits for an answer, then all start together, in the order of their
    samples.
    """

    def __init__(self) -> None:
        self.agents: set[str] = set()
        self.waiting: list[tuple[tuple[str, list[int]], asyncio.Future[None]]] = []
        self.answering: Counter[str] = Counter()
        self._changes = 0
        self._look: asyncio.Task[None] | None = None

    def enter(self, uid: str) -> None:
        self.agents.add(uid)
        self._changed()

    def leave(self, uid: str) -> None:
        self.agents.discard(uid)
        self._changed()

    @asynccontextmanager
    async def turn(self, uid: str, prompt: list[int]) -> AsyncIterator[None]:
        """Around one request to the engine."""
        place = ((uid, prompt), asyncio.get_running_loop().create_future())
        self.waiting.append(place)
        self._changed()
        try:
            await place[1]
        except BaseException:
            self.waiting = [other for other in self.waiting if other is not place]
            self.answering[uid] -= place[1].done() and not place[1].cancelled()
            self._changed()
            raise
        try:
            yield
        finally:
            self.answering[uid] -= 1
            self._changed()

    def _changed(self) -> None:
        self._changes += 1
        if self._look is None or self._look.done():
            self._look = asyncio.get_running_loop().create_task(self._settle())

    async def _settle(self) -> None:
        seen = -1
        while seen != self._changes:
            seen = self._changes
            await asyncio.sleep(SETTLE)
        if (
            self.waiting
            and {name for (name, _), _ in self.waiting} == self.agents
            and not any(self.answering.values())
        ):
            wave = sorted(self.waiting, key=lambda place: place[0])
            self.waiting = []
            for (uid, _), future in wave:
                self.answering[uid] += 1
                future.set_result(None)
