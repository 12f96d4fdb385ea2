"""Mixtures of experts: does the router use all of them."""

from __future__ import annotations

from reinforge.watch.doctor.history import RunHistory
from reinforge.watch.doctor.router_losses import LARGE, USUAL
from reinforge.watch.doctor.trouble import Knob, Trouble

KEY = "train.router_aux_loss"
MANY_DEAD = 0.1  # share of the experts to which next to no token of a step is sent


def dead_experts(history: RunHistory) -> Trouble | None:
    dead = history.late("experts/dead", 3)
    if dead is None or dead.mean < MANY_DEAD:
        return None
    fix, knob = _cure(history.setting(KEY, 0.0))
    return Trouble(
        "dead_experts",
        f"{dead.mean:.0%} of the experts get next to no token: the router has forgotten them, and"
        " they learn nothing.",
        fix,
        since=dead.steps[0],
        knob=knob,
        evidence=(str(dead),),
    )


def _cure(weight: float) -> tuple[str, Knob | None]:
    """More of the balancing loss, unless there is so much of it that nothing else counts."""
    if weight < LARGE:
        more = min(max(10 * weight, 0.01), LARGE)
        return f"Balance the router's load ({KEY}).", Knob(KEY, more, weight)
    return (
        f"{KEY}={weight:g} is large: the balancing loss outweighs the task, and more of it would"
        f" not help. Lower it ({USUAL:g} to 0.01 is usual), and look at train.learning_rate.",
        None,
    )
