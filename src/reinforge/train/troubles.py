"""What went wrong in a step: what may end the run if it goes on, and what does not, as lines of events.jsonl: no groups to train, lack of memory, faults of rollouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

from reinforge.core.backend import Metrics
from reinforge.core.faults import PREFIX, fault_events
from reinforge.core.sample import Group
from reinforge.watch.recorder import Recorder


def what_is_bad(metrics: Metrics) -> str:
    """Why a step taught nothing though it should have, as the end of a sentence; nothing if it is not so."""
    if metrics.get("train/skipped"):
        return "had a non-finite loss or gradient; weights are as before them. Lower train.learning_rate, or look at the rewards and at events.jsonl."
    if metrics.get("reward/unscored") == 1.0:
        return f"had no sample that could be scored. {_why_unscored(metrics)} `reinforge check rewards CONFIG` tries each reward."
    return ""


def _why_unscored(metrics: Metrics) -> str:
    """Where the reason is: in events, if rewards failed; nowhere else if they returned None for every completion."""
    if any(name.startswith(PREFIX) and count for name, count in metrics.items()):
        return "Why is in events.jsonl (kind fault)."
    return "Every reward returned None for every completion: nothing failed, they say that they do not apply (docs/rewards.md)."


def tell_troubles(recorder: Recorder, tell: Callable[[str], None], step: int, metrics: Metrics, groups: Sequence[Group]) -> None:
    """Those of a training step. `tell`: what the person who watches should hear at once."""
    if metrics.get("train/empty"):
        recorder.event("empty_step", step=step)
    tell_faults(recorder, step, metrics, groups)
    for role in ("train", "critic"):
        if times := int(metrics.get(f"{role}/oom", 0)):
            old, new = (int(metrics[f"{role}/oom_budget/{which}"]) for which in ("max", "min"))
            recorder.event("out_of_memory", step=step, role=role, times=times, old_budget=old, new_budget=new)
            tell(f"step {step}: {role} ran out of memory; micro-batches of {new} tokens from now on, {old} until now")


def tell_faults(recorder: Recorder, step: int, metrics: Metrics, groups: Sequence[Group], prefix: str = "") -> None:
    """One line for each kind of fault. `prefix`: of the metrics of an evaluation."""
    for event in fault_events(metrics, step, groups, prefix):
        recorder.event("fault", **asdict(event))
