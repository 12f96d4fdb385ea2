"""Two engines that live and sleep together: the policy's, and that of an opponent."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from reinforge.core.engine import Completion, Engine, Sampling
from reinforge.core.weights import Weights

PREFIX = "opponent_"  # of the second one's state


class EngineWithOpponent:
    """An `Engine` of two: the policy's, which answers, and that of its opponent, which gets the
    same updates. `build/opponent.py` makes it; who wants the opponent's answers asks that one
    itself.
    """

    stats = None  # what the two did is not added up
    streaming = None  # who wants to hear tokens asks one of them

    def __init__(self, first: Engine, second: Engine):
        self.first = first
        self.second = second

    @property
    def measured(self) -> Mapping[str, float]:
        """Of the first one's newest update."""
        return self.first.measured

    async def generate(
        self, tokens: Sequence[int], params: Sampling, *, key: int, n: int = 1
    ) -> list[Completion]:
        return await self.first.generate(tokens, params, key=key, n=n)

    async def update(self, weights: Weights, version: int) -> None:
        await asyncio.gather(
            self.first.update(weights, version), self.second.update(weights, version)
        )

    async def sleep(self) -> None:
        await asyncio.gather(self.first.sleep(), self.second.sleep())

    def state(self) -> dict[str, int]:
        return {
            **self.first.state(),
            **{PREFIX + name: value for name, value in self.second.state().items()},
        }

    def load(self, state: dict[str, int]) -> None:
        self.first.load(
            {name: value for name, value in state.items() if not name.startswith(PREFIX)}
        )
        self.second.load(
            {
                name.removeprefix(PREFIX): value
                for name, value in state.items()
                if name.startswith(PREFIX)
            }
        )

    def close(self) -> None:
        self.first.close()
        self.second.close()
