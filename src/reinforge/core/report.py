"""What an optimizer step did: the facts by which loops decide. Metrics are what people look at."""

from __future__ import annotations

import math
from dataclasses import dataclass

from reinforge.core.metrics import Metric, Reduction, StepMetrics


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """How often a device's memory ran out, and how micro-batches shrank for it: packed tokens of
    one before the first time and after the last. A part of a `StepReport`.
    """

    times: int
    old_budget: int
    new_budget: int


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one optimizer step did. `Backend.step` makes it, wherever the model is; the loops
    decide by it.
    """

    grad_norm: float  # before it was clipped
    learning_rate: float
    # since the step before; None: there was enough
    out_of_memory: OutOfMemory | None = None

    @property
    def skipped(self) -> bool:
        """Whether the gradient was not finite, so that the weights are as before."""
        return not math.isfinite(self.grad_norm)

    @property
    def empty(self) -> bool:
        """Whether there was nothing to train: the gradient is 0, and the weights are as before."""
        return self.grad_norm == 0

    def metrics(self, role: str = "train") -> StepMetrics:
        """The same for people, under the names of a role: train, or critic.

        One bad step of the policy makes a bad training step; a critic's are told as a share.
        """
        bad = Reduction.MAX if role == "train" else Reduction.MEAN
        found = {
            f"{role}/grad_norm": Metric(self.grad_norm),
            f"{role}/learning_rate": Metric(self.learning_rate),
            f"{role}/skipped": Metric(self.skipped, bad),
            f"{role}/empty": Metric(self.empty, bad),
        }
        short = self.out_of_memory
        if short is not None:
            found[f"{role}/oom"] = Metric(short.times, Reduction.MAX)
            found[f"{role}/oom_budget/max"] = Metric(short.old_budget, Reduction.MAX)
            found[f"{role}/oom_budget/min"] = Metric(short.new_budget, Reduction.MIN)
        return found
