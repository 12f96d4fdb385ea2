"""Does the critic help."""

from __future__ import annotations

from reinforge.watch.doctor.history import RunHistory
from reinforge.watch.doctor.trouble import Knob, Trouble

WORSE_THAN_A_CONSTANT = -0.3  # explained variance; 0 is that of a constant


def critic(history: RunHistory) -> Trouble | None:
    explained = history.late("critic/explained_variance")
    if explained is None or explained.mean > WORSE_THAN_A_CONSTANT:
        return None
    rate = history.setting("critic.learning_rate")
    return Trouble(
        "critic",
        f"The critic is worse than a constant (explained variance {explained.mean:.2f}): its"
        " advantages add noise.",
        "Lower critic.learning_rate, and let the critic learn alone first (critic.warmup).",
        since=explained.steps[0],
        knob=None if rate is None else Knob("critic.learning_rate", rate / 10, rate),
        evidence=tuple(
            f"{both[0]} -> {both[1]}"
            for name in ("critic/explained_variance", "critic/loss")
            if (both := history.ends(name)) is not None
        ),
    )
