"""The terms of a policy loss beside the surrogate: their coefficients, and how those move from step
to step.

The moves are pure functions of the old coefficient and of a metric of the step, so a resumed run
continues them exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


def adaptive_kl(
    coefficient: float, kl: float, *, target: float, horizon: int, samples: int
) -> float:
    """Ziegler's proportional controller (1909.08593, section 2.2): beta <- beta (1 + clip(kl /
    target - 1, -0.2, 0.2) samples / horizon).

    `kl` and `target` are means per token. A batch larger than the horizon moves beta as one of the
    horizon does.

    >>> adaptive_kl(0.1, 0.06, target=0.05, horizon=1000, samples=100)
    0.10200000000000001
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * min(samples, horizon) / horizon)


def adaptive_entropy(
    coefficient: float, entropy: float, *, target: float, rate: float, limit: float
) -> float:
    """Rises by `rate` while the entropy is below the target, falls while it is above, within [0,
    limit] (Skywork-OR1, 2505.22312).

    >>> adaptive_entropy(0.002, 0.1, target=0.3, rate=0.001, limit=0.1)
    0.003
    >>> adaptive_entropy(0.0005, 0.4, target=0.3, rate=0.001, limit=0.1)
    0.0
    """
    moved = coefficient + (rate if entropy < target else -rate if entropy > target else 0.0)
    return min(max(moved, 0.0), limit)


@dataclass
class LossTerms:
    """Coefficients of KL, entropy and the NLL of positive samples.

    With a target, the first two adapt.
    """

    kl: float = 0.0
    entropy: float = 0.0
    nll: float = 0.0
    kl_target: float | None = None  # mean KL per token
    kl_horizon: int = 10_000  # samples
    entropy_target: float | None = None  # mean per token
    entropy_rate: float = 1e-3
    entropy_limit: float = 0.1

    @property
    def bonus(self) -> bool:
        """Whether the entropy enters the loss, now or later."""
        return self.entropy > 0 or self.entropy_target is not None

    def adapt(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Moves the coefficients by the metrics of a step and says what they were in it.

        What was not measured moves nothing.
        """
        used: dict[str, float] = {}
        kl = metrics.get("policy/kl", math.nan)
        entropy = metrics.get("policy/entropy", math.nan)
        if self.kl_target is not None:
            used["policy/kl_coefficient"] = self.kl
            if math.isfinite(kl):
                samples = int(metrics.get("batch/samples", 0))
                self.kl = adaptive_kl(
                    self.kl, kl, target=self.kl_target, horizon=self.kl_horizon, samples=samples
                )
        if self.entropy_target is not None:
            used["policy/entropy_coefficient"] = self.entropy
            if math.isfinite(entropy):
                self.entropy = adaptive_entropy(
                    self.entropy,
                    entropy,
                    target=self.entropy_target,
                    rate=self.entropy_rate,
                    limit=self.entropy_limit,
                )
        return used

    def values(self) -> dict[str, float]:
        """What adapts, as a checkpoint keeps it. What does not is the configuration's."""
        return {
            name: getattr(self, name)
            for name in ("kl", "entropy")
            if getattr(self, f"{name}_target") is not None
        }

    def restore(self, values: Mapping[str, Any]) -> None:
        for name in self.values():
            if name in values:
                setattr(self, name, values[name])
