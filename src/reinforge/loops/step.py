"""What one step of a run did, with all its optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reinforge.core.metrics import Metrics
from reinforge.core.report import OutOfMemory, StepReport


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """What one step of a run did: the facts by which the run decides, and the metrics that it
    logs. The loops make it and hand it to `Run.end_step`.
    """

    metrics: Metrics
    policy: Sequence[StepReport] = ()  # none while only the critic is trained
    critic: Sequence[StepReport] = ()
    processed: float = 0.0  # tokens that a gradient was computed of
    unscored: bool = False  # no sample of the step could be scored
    faults: bool = False  # something beside training went wrong

    @property
    def skipped(self) -> bool:
        """Whether a gradient was not finite; one of several makes the step a bad one."""
        return any(report.skipped for report in (*self.policy, *self.critic))

    @property
    def empty(self) -> bool:
        """Whether the policy had nothing to learn in an optimizer step, or there was none."""
        if not self.policy and not self.critic:
            return True
        return any(report.empty for report in self.policy)

    @property
    def grad_norm(self) -> float | None:
        """The policy's, as a mean over its optimizer steps."""
        if not self.policy:
            return None
        return sum(report.grad_norm for report in self.policy) / len(self.policy)

    def out_of_memory(self) -> dict[str, OutOfMemory]:
        """Of each role whose memory ran out: as often as in its worst optimizer step, with the
        largest and the smallest micro-batch of all of them.
        """
        found = {}
        for role, reports in (("train", self.policy), ("critic", self.critic)):
            told = [r.out_of_memory for r in reports if r.out_of_memory is not None]
            if told:
                found[role] = OutOfMemory(
                    times=max(one.times for one in told),
                    old_budget=max(one.old_budget for one in told),
                    new_budget=min(one.new_budget for one in told),
                )
        return found
