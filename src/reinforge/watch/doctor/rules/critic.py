"""Does the critic help."""

from __future__ import annotations

from reinforge.watch.doctor.history import RunHistory, change
from reinforge.watch.doctor.trouble import Knob, Trouble

WORSE_THAN_A_CONSTANT = -0.3  # explained variance; 0 is that of a constant


def critic(history: RunHistory) -> Trouble | None:
    both = history.ends("critic/explained_variance")
    if both is None or both[1].mean > WORSE_THAN_A_CONSTANT:
        return None
    early, explained = both
    rate = history.setting("critic.learning_rate", history.setting("train.learning_rate"))
    warmup = history.setting("critic.warmup", 0)
    began = early.mean < WORSE_THAN_A_CONSTANT
    return Trouble(
        "critic",
        f"The critic is worse than a constant (explained variance {explained.mean:.2f}): its"
        " advantages add noise.",
        "It began so: let it learn alone first (critic.warmup), faster, or start it from the policy"
        " (critic.path)."
        if began
        else "It learned that: lower critic.learning_rate.",
        since=(early if began else explained).steps[0],
        knob=(
            Knob("critic.warmup", max(20, 2 * warmup), warmup)
            if began
            else None
            if rate is None
            else Knob("critic.learning_rate", rate / 10, rate)
        ),
        evidence=tuple(
            change(*both)
            for name in ("critic/explained_variance", "critic/loss")
            if (both := history.ends(name)) is not None
        ),
    )
