"""Time and memory."""

from __future__ import annotations

from itertools import pairwise

from reinforge.watch.doctor.history import SHARES, TIMES, RunHistory
from reinforge.watch.doctor.trouble import Knob, Trouble

# the largest share of the time that a phase beside generating and training may take
BESIDE = {"reward_wait": 0.4, "eval": 0.5, "checkpoint": 0.3, "prepare": 0.4, "other": 0.4}
SECONDS = 0.1  # of such a phase per step, below which nobody waits
LONG = 10  # steps that say where time goes
GROWTH = 0.1  # of the memory there was
LEAST_GIB = 0.1
ADVICE = {
    "reward_wait": "The rewards are slow: make them faster, or let them overlap with generation"
    " (rollout.staleness=1).",
    "eval": "Evaluate less often (eval.every), or on fewer rows.",
    "checkpoint": "Save less often (run.checkpoint.every).",
    "prepare": "Packing takes long: larger train.tokens_per_microbatch, fewer rows.",
    "other": "It is spent between the phases: callbacks, trackers, the disk.",
}


def slow_phase(history: RunHistory) -> Trouble | None:
    worst: tuple[float, str, float] | None = None
    if len(history) < LONG:
        return None
    total = history.window(f"{TIMES}step")
    if total is None or not total.mean:
        return None
    for phase, limit in BESIDE.items():
        spent = history.window(f"{TIMES}{phase}")
        if spent is None:
            continue
        seconds = sum(spent.values) / len(history)
        share = sum(spent.values) / sum(total.values)
        if share > limit and seconds > SECONDS and (worst is None or share > worst[0]):
            worst = (share, phase, seconds)
    if worst is None:
        return None
    share, phase, seconds = worst
    every = history.setting("eval.every", 0)
    knobs = {
        "reward_wait": Knob("rollout.staleness", 1, history.setting("rollout.staleness")),
        "eval": Knob("eval.every", max(1, 5 * every), every),
        "checkpoint": Knob("run.checkpoint.every", 50, history.setting("run.checkpoint.every")),
    }
    return Trouble(
        "slow_phase",
        f"{phase} takes {share:.0%} of the time, {seconds:.2g} s of {total.mean:.2g} s a step.",
        ADVICE[phase],
        since=history.steps[0],
        knob=knobs.get(phase),
        evidence=tuple(
            f"{name} {window.mean:.0%}"
            for name in sorted(history.columns)
            if name.startswith(SHARES) and (window := history.window(name)) is not None
        ),
    )


def memory_growth(history: RunHistory) -> Trouble | None:
    """It rises from step to step, not once: over the second half of the run, in most of its
    quarters.
    """
    peaks = history.window("memory/peak_gib")
    if peaks is None or len(peaks.values) < 2 * LONG:
        return None
    half = peaks.values[len(peaks.values) // 2 :]
    steps = peaks.steps[len(peaks.values) // 2 :]
    quarter = len(half) // 4
    marks = [half[i * quarter] for i in range(4)] + [half[-1]]
    grown = half[-1] - half[0]
    rises = all(b - a > 0.1 * grown for a, b in pairwise(marks))
    if not rises or grown < LEAST_GIB or grown < GROWTH * half[0]:
        return None
    per_step = grown / (len(half) - 1)
    return Trouble(
        "memory_growth",
        f"Memory grows by {1024 * per_step:.3g} MiB a step: {half[0]:.3g} GiB at step {steps[0]},"
        f" {half[-1]:.3g} GiB at step {steps[-1]}.",
        "Something keeps what it should drop: look at rewards, callbacks and environments of your"
        " own for lists that grow; a checkpoint and a new start (run.max_seconds) helps meanwhile.",
        since=steps[0],
        evidence=(
            f"memory/peak_gib {half[0]:.3g} -> {half[-1]:.3g} (steps {steps[0]} to {steps[-1]})",
        ),
    )
