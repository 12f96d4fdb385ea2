"""Mixtures of experts: does the router use all of them."""

from __future__ import annotations

from reinforge.watch.doctor.history import RunHistory
from reinforge.watch.doctor.trouble import Knob, Trouble

MANY_DEAD = 0.1  # share of the experts to which next to no token of a step is sent


def dead_experts(history: RunHistory) -> Trouble | None:
    dead = history.late("experts/dead", 3)
    if dead is None or dead.mean < MANY_DEAD:
        return None
    weight = history.setting("train.router_aux_loss", 0.0)
    return Trouble(
        "dead_experts",
        f"{dead.mean:.0%} of the experts get next to no token: the router has forgotten them, and"
        " they learn nothing.",
        "Balance the router's load (train.router_aux_loss).",
        since=dead.steps[0],
        knob=Knob("train.router_aux_loss", max(10 * weight, 0.01), weight),
        evidence=(str(dead),),
    )
