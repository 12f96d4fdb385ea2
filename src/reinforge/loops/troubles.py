"""What went wrong in a step: what may end the run if it goes on, and what does not, as lines of
events.jsonl: no groups to train, lack of memory, faults of rollouts. And how a run ended. Whether
it could learn at all is for `reinforge.watch.doctor` to say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from reinforge.config.train import TrainConfig
from reinforge.core.errors import ReinforgeError, StoppedByPolicy, Terminated
from reinforge.core.faults import fault_events
from reinforge.core.metrics import Metrics
from reinforge.core.sample import Group
from reinforge.loops.step import TrainingStep
from reinforge.watch.doctor.router_losses import METRICS, huge_loss
from reinforge.watch.recorder import Recorder

NONFINITE = "nonfinite"
UNSCORED = "unscored"
BAD_STEPS_IN_A_ROW = 3


def ending_of(error: BaseException | None) -> str:
    """How a run ended, as the kind of its last event."""
    if error is None:
        return "finished"
    if isinstance(error, Terminated):
        return "terminated"
    return "stopped" if isinstance(error, StoppedByPolicy) else "failed"


def error_line(error: BaseException) -> str:
    """An error in one line: what it says, and of an unexpected one also its kind."""
    said = str(error).strip().partition("\n")[0]
    if isinstance(error, ReinforgeError):
        return said
    kind = type(error).__name__
    return f"{kind}: {said}" if said else kind


@dataclass
class BadSteps:
    """Steps in a row that taught nothing though they should have.

    A run has one, saves it, and shows it every step.
    """

    count: int = 0
    kind: str = ""  # what was bad about the last of them

    def observe(self, step: TrainingStep) -> None:
        bad = what_is_bad(step)
        if bad:
            self.count += 1
            self.kind = bad
        elif absolves(step, self.kind):
            self.count = 0
            self.kind = ""

    def check(self, step: TrainingStep, train: TrainConfig) -> None:
        """Ends the run if this step is one too many."""
        bad = what_is_bad(step)
        if bad and self.count >= BAD_STEPS_IN_A_ROW:
            raise StoppedByPolicy(f"{self.count} steps in a row {why_bad(bad, step, train)}")


def what_is_bad(step: TrainingStep) -> str:
    """Why a step taught nothing though it should have, as a kind; nothing if it is not so."""
    if step.skipped:
        return NONFINITE
    return UNSCORED if step.unscored else ""


def absolves(step: TrainingStep, bad: str) -> bool:
    """Whether a step that was not bad ends a row of steps that were.

    Where nothing had a gradient it says nothing about whether gradients are finite: a policy that
    was blown up answers nonsense, its rewards tie, and between two NaN there is a 0.
    """
    return not (bad == NONFINITE and step.empty)


def why_bad(bad: str, step: TrainingStep, train: TrainConfig) -> str:
    """The same in words, as the end of a sentence."""
    if bad == NONFINITE:
        said = "had a non-finite loss or gradient; weights are as before them."
        return f"{said} {_cure_of_nonfinite(step, train)}"
    return (
        f"had no sample that could be scored. {_why_unscored(step)} `reinforge check rewards"
        " CONFIG` tries each reward."
    )


def _cure_of_nonfinite(step: TrainingStep, train: TrainConfig) -> str:
    coefficients = {key: getattr(train, key.removeprefix("train.")) for key in METRICS}
    huge = huge_loss(coefficients, step.metrics)
    if huge is not None:
        return f"{huge}. {huge.fix}"
    return "Lower train.learning_rate, or look at the rewards and at events.jsonl."


def _why_unscored(step: TrainingStep) -> str:
    """Where the reason is: in events, if rewards failed; nowhere else if they returned None for
    every completion.
    """
    if step.faults:
        return "Why is in events.jsonl (kind fault)."
    return (
        "Every reward returned None for every completion: nothing failed, they say that they do not"
        " apply (docs/rewards.md)."
    )


def report_troubles(
    recorder: Recorder,
    tell: Callable[[str], None],
    number: int,
    step: TrainingStep,
    groups: Sequence[Group],
) -> None:
    """Those of step number `number`. `tell`: what the person who watches should hear at once."""
    if step.skipped:
        recorder.event("skipped_step", step=number, grad_norm=step.grad_norm)
    if step.empty:
        recorder.event("empty_step", step=number)
    report_faults(recorder, number, step.metrics, groups)
    for role, told in step.out_of_memory().items():
        recorder.event("out_of_memory", step=number, role=role, **asdict(told))
        tell(
            f"step {number}: {role} ran out of memory; micro-batches of {told.new_budget} tokens"
            f" from now on, {told.old_budget} until now"
        )


def report_faults(
    recorder: Recorder, step: int, metrics: Metrics, groups: Sequence[Group], prefix: str = ""
) -> None:
    """One line for each kind of fault. `prefix`: of the metrics of an evaluation."""
    for event in fault_events(metrics, step, groups, prefix):
        recorder.event("fault", **asdict(event))
