"""The learning rate: did the model become worse than it was, or did nothing move at all."""

from __future__ import annotations

import math
from itertools import pairwise

from reinforge.watch.doctor.history import CLEARLY, SCORED, RunHistory, Window, change
from reinforge.watch.doctor.rules.policy import too_many_updates
from reinforge.watch.doctor.trouble import Knob, Trouble

WORSE = 1.1  # times the loss of the start
MUCH_WORSE = 2.0
STILL = 2.0  # standard errors of chance within which nothing moved
FEW = 5  # steps whose mean loss is compared with that of the first
LONG = 50  # steps before nothing that moves says something
USUAL = 1e-6  # rates below it are those of no model
HARDLY = 1e-3  # relative change of a loss that is none
MOVING = ("reward/mean", "policy/entropy", "response/length")


def learning_rate_high(history: RunHistory) -> Trouble | None:
    """What is learned ended worse than it began. Where many updates of one batch are clipped, the
    rule of the clip tells it.
    """
    found = None if too_many_updates(history) else _worse(history)
    rate = history.setting("train.learning_rate")
    if found is None or rate is None:
        return None
    early, late = found
    return Trouble(
        "learning_rate_high",
        f"The model is worse than at the start: {late.name} went from {early.mean:.3g} to"
        f" {late.mean:.3g}. Steps are too large (train.learning_rate {rate:.3g}).",
        "Lower train.learning_rate, or begin with train.schedule.warmup.",
        since=_since(history, early, late),
        knob=Knob("train.learning_rate", rate / 10, rate),
        evidence=(
            change(early, late),
            *(
                change(*both)
                for name in ("policy/entropy", "train/grad_norm")
                if (both := history.ends(name)) is not None
            ),
        ),
    )


def _since(history: RunHistory, early: Window, late: Window) -> int:
    """The first step that is nearer to how it ended than to how it began."""
    whole = history.window(late.name)
    assert whole is not None
    nearer = (
        step
        for step, value in zip(whole.steps, whole.values, strict=True)
        if abs(value - late.mean) < abs(value - early.mean)
    )
    return next(nearer, late.steps[0])


def _worse(history: RunHistory) -> tuple[Window, Window] | None:
    """Start and worst windows of what is learned, where it became worse than it was."""
    if history.window(SCORED) is not None:
        return _lost_reward(history)
    return _rising_loss(history)


def _lost_reward(history: RunHistory) -> tuple[Window, Window] | None:
    """The reward fell over the run; or it was lost in the first steps, which leaves no trend: then
    the first step, or the evaluation before it, was clearly better than the last quarter.
    """
    both = history.ends("reward/mean")
    whole = history.window("reward/mean")
    spread = history.window("reward/std")
    if both is None or whole is None or spread is None:
        return None
    if history.trend("reward/mean") < -CLEARLY:
        return both
    start = Window(whole.name, whole.steps[:1], whole.values[:1])
    late = both[1]
    norms = history.window("train/grad_norm")
    if norms is None or not any(norms.values[:FEW]):
        return None  # nothing has moved
    groups = history.window("groups/trained")
    error = spread.values[0] / math.sqrt(max(1.0, groups.values[0] if groups else 1.0))
    if start.mean - late.mean > CLEARLY * error:
        return start, late
    lost = history.worsens() and late.mean < start.mean - error
    return (start, late) if lost else None


def _rising_loss(history: RunHistory) -> tuple[Window, Window] | None:
    """The loss of a few steps together was above that of the first by a tenth and by more than
    chance, and it has not come back; or it was twice that. Steps differ by chance as neighbours do;
    pairs that are not yet learned all have the same loss.
    """
    loss = history.window("train/loss")
    late = history.late("train/loss")
    if loss is None or late is None:
        return None
    first = loss.values[0]
    starts = range(1, len(loss.values) - FEW + 1)
    means = {i: math.fsum(loss.values[i : i + FEW]) / FEW for i in starts}
    worst = max(means, key=lambda i: means[i])
    steps = sorted(abs(b - a) for a, b in pairwise(loss.values[1:]))
    noise = steps[len(steps) // 2]  # about the standard deviation of one step
    margins = history.window("rewards/margin")
    exact = margins is not None and margins.values[0] == 0
    error = noise * math.sqrt(1 / FEW + (0 if exact else 1))
    if first <= 0 or means[worst] < max(WORSE * first, first + CLEARLY * error):
        return None
    if late.mean < first and means[worst] < MUCH_WORSE * first:
        return None
    return (
        Window(loss.name, loss.steps[:1], loss.values[:1]),
        Window(loss.name, loss.steps[worst : worst + FEW], loss.values[worst : worst + FEW]),
    )


def _moves(history: RunHistory, window: Window) -> bool:
    """Whether a metric moved by more than chance. A loss has to move by a thousandth: pairs have
    no noise at first, and any rate moves them.
    """
    both = history.ends(window.name)
    if both is None:
        return False
    if window.name == "train/loss":
        moved = abs(both[1].mean - both[0].mean)
        if moved < HARDLY * abs(both[0].mean):
            return False
    return abs(history.clearness(window)) > STILL


def learning_rate_low(history: RunHistory) -> Trouble | None:
    """Gradients are there, and after many steps no metric differs from its start by more than
    chance, evaluation included.
    """
    rate = history.setting("train.learning_rate")
    norms = history.window("train/grad_norm")
    if rate is None or norms is None or len(history) < LONG:
        return None
    if sum(value > 0 for value in norms.values) * 2 < len(history):
        return None
    names = MOVING if history.window(SCORED) is not None else ("train/loss",)
    moving = [window for name in names if (window := history.window(name)) is not None]
    if not moving or any(_moves(history, window) for window in moving):
        return None
    if history.surely_improves() or history.worsens():
        return None
    return Trouble(
        "learning_rate_low",
        f"Nothing moves: after {len(history)} steps with a gradient (norm {norms.mean:.3g}) no"
        f" metric differs from its start by more than chance. Steps are too small"
        f" (train.learning_rate {rate:.3g}).",
        "Raise train.learning_rate, ten times at a time. Usual are 1e-6 to 1e-5 for all weights of"
        " a large model, 1e-5 to 1e-4 for an adapter, 1e-4 to 1e-3 for a tiny model.",
        since=history.steps[0],
        knob=Knob("train.learning_rate", max(10 * rate, USUAL), rate),
        evidence=tuple(change(*both) for name in names if (both := history.ends(name)) is not None),
    )
