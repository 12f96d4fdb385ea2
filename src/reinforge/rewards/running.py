"""What a reward counts: less its running mean, over its running standard deviation, clipped.

For rewards whose scale nobody chose.

Statistics are those of all earlier steps, and move once per step: every sample of a step is treated
alike, whatever order rollouts end in, and a step that was cut and is done again sees what it saw.
In the first step there are none, and rewards count as they are scored. The components on a sample
(and their metrics) stay as scored; only the total changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reinforge.core.backend import State
from reinforge.core.sample import Sample

if TYPE_CHECKING:
    from reinforge.rewards.function import FunctionReward

SMALLEST = 1e-8  # a standard deviation below it is that of a constant: nothing to divide by


@dataclass(slots=True)
class Moments:
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
class Rule:
    center: bool = False
    scale: bool = False
    clip: tuple[float, float] | None = None

    def apply(self, value: float, seen: Moments) -> float:
        if self.center and seen.n:
            value -= seen.mean
        if self.scale and seen.std > SMALLEST:
            value /= seen.std
        return value if self.clip is None else min(max(value, self.clip[0]), self.clip[1])


@dataclass
class Running:
    """The rules of the rewards that have one, by name, and what was seen of each.

    A part of the run.
    """

    rules: Mapping[str, Rule]
    seen: dict[str, Moments] = field(default_factory=dict)

    @classmethod
    def of(cls, rewards: Iterable[FunctionReward]) -> Running:
        return cls({r.name: r.rule for r in rewards if r.rule != Rule()})

    def __call__(self, components: Mapping[str, float | None]) -> dict[str, float | None]:
        """The components as they count in the total."""
        return {
            name: (
                value
                if value is None or name not in self.rules
                else self.rules[name].apply(value, self.seen.get(name, Moments()))
            )
            for name, value in components.items()
        }

    def observe(self, samples: Iterable[Sample]) -> None:
        """The samples of a step that is done, as they were scored."""
        samples = list(samples)
        for name, rule in self.rules.items():
            if rule.center or rule.scale:
                self.seen.setdefault(name, Moments()).add(
                    [v for s in samples if (v := s.rewards.get(name)) is not None]
                )

    def state(self) -> State:
        return State({}, {name: [m.n, m.mean, m.m2] for name, m in self.seen.items()})

    def load(self, state: State) -> None:
        self.seen = {name: Moments(*values) for name, values in state.meta.items()}
