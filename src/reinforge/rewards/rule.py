"""What a reward counts: less its running mean, over its running standard deviation, clipped.

For rewards whose scale nobody chose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SMALLEST = 1e-8  # a standard deviation below it is that of a constant: nothing to divide by


@dataclass(slots=True)
class RunningMoments:
    """Mean and spread of what a reward has given so far."""

    n: int = 0
    mean: float = 0.0
    m2: float = 0.0  # sum of squared deviations from the mean

    def add(self, values: list[float]) -> None:
        """Merges a batch (Chan, Golub and LeVeque 1979): no cancellation, however far from 0 the
        values are.
        """
        if not values:
            return
        n = len(values)
        mean = math.fsum(values) / n
        m2 = math.fsum((x - mean) ** 2 for x in values)
        gap = mean - self.mean
        both = self.n + n
        self.m2 += m2 + gap * gap * self.n * n / both
        self.mean += gap * n / both
        self.n = both

    @property
    def std(self) -> float:
        return math.sqrt(self.m2 / (self.n - 1)) if self.n > 1 else 0.0


@dataclass(frozen=True, slots=True)
class NormalizationRule:
    """How one component of the reward is centred, scaled and clipped by what it gave so far. Made
    from the options of a reward; `RewardNormalization` applies it.
    """

    center: bool = False
    scale: bool = False
    clip: tuple[float, float] | None = None

    def apply(self, value: float, seen: RunningMoments) -> float:
        if self.center and seen.n:
            value -= seen.mean
        if self.scale and seen.std > SMALLEST:
            value /= seen.std
        return value if self.clip is None else min(max(value, self.clip[0]), self.clip[1])
