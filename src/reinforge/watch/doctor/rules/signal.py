"""Is there anything to learn from: gradients and rewards."""

from __future__ import annotations

import math

from reinforge.watch.doctor.history import SCORED, RunHistory, finite
from reinforge.watch.doctor.router_losses import METRICS, USUAL, huge_loss
from reinforge.watch.doctor.trouble import Knob, Trouble

MOST_UNSCORED = 0.1  # share of answers without a reward that is still no trouble
MOST_SKIPPED = 0.05  # share of steps whose gradient was not finite, likewise
LOST = 0.2  # of the reward before, that is left in steps without a gradient
ROUNDING = 1e-9  # relative spread of rewards that are equal and were averaged


def nonfinite(history: RunHistory) -> Trouble | None:
    skipped = [
        step
        for step, value in zip(history.steps, history.column("train/skipped"), strict=True)
        if value
    ]
    n = len(history)
    if len(skipped) <= MOST_SKIPPED * n:
        return None
    fix, knob = _cure_of_nonfinite(history)
    return Trouble(
        "nonfinite",
        f"{len(skipped)} of {n} steps had a gradient that was not finite (NaN or infinity) and did"
        " not change the weights.",
        fix,
        since=skipped[0],
        knob=knob,
        evidence=(f"train/skipped is 1 in steps {listed(skipped)}",),
    )


def _cure_of_nonfinite(history: RunHistory) -> tuple[str, Knob | None]:
    """The learning rate, unless a loss of the routers is what is large."""
    coefficients = {key: history.setting(key) for key in METRICS}
    windows = [history.window(metric) for metric in METRICS.values()]
    largest = {window.name: max(window.values) for window in windows if window is not None}
    huge = huge_loss(coefficients, largest)
    if huge is not None:
        return f"{huge}. {huge.fix}", Knob(huge.key, USUAL, huge.coefficient)
    rate = history.setting("train.learning_rate")
    knob = None if rate is None else Knob("train.learning_rate", rate / 10, rate)
    return "Lower train.learning_rate, and look at the rewards.", knob


def unscored(history: RunHistory) -> Trouble | None:
    shares = history.window(SCORED)
    if shares is None or shares.mean <= MOST_UNSCORED:
        return None
    return Trouble(
        "unscored",
        f"{shares.mean:.0%} of the answers got no reward: they could not be scored, and taught"
        " nothing.",
        (
            "Why is in events.jsonl (kind fault)."
            if history.faults
            else "Nothing failed: the rewards returned None for them."
        )
        + " `reinforge check rewards CONFIG` tries each reward.",
        since=next(
            s for s, v in zip(shares.steps, shares.values, strict=True) if v > MOST_UNSCORED
        ),
        evidence=(f"{shares}",),
    )


def constant_reward(history: RunHistory) -> Trouble | None:
    means = {float(f"{row.mean:.9g}") for row in _rewards(history)}
    if len(means) != 1 or history.taught or any(row.differ for row in _rewards(history)):
        return None
    value = means.pop()
    other = "already solved" if value else "far too hard"
    given = f" ({', '.join(history.reward_names)})" if history.reward_names else ""
    return Trouble(
        "constant_reward",
        f"Every answer in {steps(len(history))} got the same reward, {value:.4g}: there was"
        " nothing to learn from.",
        f"Does the reward{given} read answers as they are written, or is the task {other}?"
        " `reinforge runs why RUN --group 0` shows prompts, answers and rewards; `reinforge check"
        " rewards RUN/config.json` tries right and wrong answers on each reward.",
        since=history.steps[0],
        evidence=(f"reward/std is 0 in all {steps(len(history))}",),
    )


def no_gradient(history: RunHistory) -> Trouble | None:
    unscored = {i for i, share in enumerate(history.column(SCORED)) if share == 1}
    idle = [i for i in _idle(history) if i not in unscored]  # of the others `unscored` tells
    looked = len(history) - len(unscored)
    if len(idle) * 2 <= looked or constant_reward(history) or solved(history):
        return None
    which = " that had scored answers" if unscored else ""
    share = f"{len(idle)} of {steps(looked)}{which} taught nothing"
    first = history.steps[idle[0]]
    if history.window(SCORED) is None:
        return Trouble(
            "no_gradient",
            f"{share}: the gradient was exactly 0.",
            "Look at data.loss_on, at the rows and at train.learning_rate.",
            since=first,
            evidence=(f"train/grad_norm is 0 in {len(idle)} of {steps(len(history))}",),
        )
    rewards = [finite(history.column("reward/mean")[i]) or 0.0 for i in idle]
    size = history.setting("algorithm.group_size")
    rate = history.setting("train.learning_rate")
    before = [v for v in history.column("reward/mean")[: idle[0]] if v == v]
    was = math.fsum(before) / len(before) if before else 0.0
    lost = was > 0 and math.fsum(rewards) / len(rewards) < LOST * was
    return Trouble(
        "no_gradient",
        f"{share}: all answers to a prompt got the same reward (mean"
        f" {math.fsum(rewards) / len(rewards):.3g} in those steps), which gives no gradient.",
        f"Before step {first} the mean reward was {was:.3g}: the policy was lost in a few steps."
        " Lower train.learning_rate."
        if lost
        else "Take easier prompts where the reward is low and harder ones where it is high, a"
        " larger algorithm.group_size or a higher rollout.temperature; algorithm.dynamic_sampling"
        " replaces such groups.",
        since=first,
        knob=(
            Knob("train.learning_rate", rate / 10, rate)
            if lost and rate
            else None
            if size is None
            else Knob("algorithm.group_size", 2 * size, size)
        ),
        evidence=tuple(
            str(window)
            for name in ("groups/zero_variance", "reward/mean")
            if (window := history.window(name)) is not None
        ),
    )


def solved(history: RunHistory) -> Trouble | None:
    """Most steps are a row at the end in which every answer got at least the highest mean that any
    step had, after others that had something to learn.
    """
    if not any(row.differ for row in _rewards(history)):
        return None
    best = -math.inf
    row_length = 0
    first = 0
    idle = set(_idle(history))
    for i, row in enumerate(_rewards(history, every=True)):
        mean = row.mean
        rounding = ROUNDING * max(1.0, abs(mean)) if mean == mean else 0.0
        if mean != mean or i not in idle or row.differ or mean < best - rounding:
            row_length = 0
        elif row_length == 0 or mean > best + rounding:
            first = history.steps[i]
            row_length = 1
        else:
            row_length += 1
        best = max(best, mean) if mean == mean else best
    if row_length * 2 <= len(history):
        return None
    return Trouble(
        "solved",
        f"Solved after step {first - 1}, as far as rewards tell: every answer since got"
        f" {best:.4g}, more than the mean of any step before, and {steps(row_length)} had nothing"
        " to learn from.",
        "If that is all there is to get, take harder prompts, or let eval.early_stop end such a"
        " run; if not, samples.jsonl shows what the answers settled on.",
        since=first,
    )


class _StepRewards:
    """The rewards of one step: their mean (NaN where it has none), and whether they differ."""

    __slots__ = ("differ", "mean")

    def __init__(self, mean: float, spread: float):
        self.mean = mean
        self.differ = spread > ROUNDING * max(1.0, abs(mean)) if mean == mean else False


def _rewards(history: RunHistory, *, every: bool = False) -> list[_StepRewards]:
    """`every`: of steps without rewards too."""
    found = []
    columns = zip(
        history.column(SCORED),
        history.column("reward/mean"),
        history.column("reward/std"),
        strict=True,
    )
    for scored, mean, spread in columns:
        row = _StepRewards(mean if scored == scored else math.nan, spread)
        if every or row.mean == row.mean:
            found.append(row)
    return found


def _idle(history: RunHistory) -> list[int]:
    """The steps, by their place, whose gradient was 0.

    Where every advantage is 0, a KL, an entropy or a router's term may still give one.
    """
    found = []
    columns = zip(
        history.column("train/grad_norm"),
        history.column("train/empty"),
        history.column("batch/signal"),
        history.column("train/skipped"),
        strict=True,
    )
    for i, (norm, empty, signal, skipped) in enumerate(columns):
        unknown = norm != norm and not skipped
        if norm == 0 or (unknown and (empty == 1 or signal == 0)):
            found.append(i)
    return found


def steps(n: int) -> str:
    return f"{n} steps" if n != 1 else "1 step"


def listed(numbers: list[int], most: int = 6) -> str:
    """
    >>> listed([1, 2, 3], 2)
    '1, 2 and 1 more'
    """
    shown = ", ".join(map(str, numbers[:most]))
    return shown if len(numbers) <= most else f"{shown} and {len(numbers) - most} more"
