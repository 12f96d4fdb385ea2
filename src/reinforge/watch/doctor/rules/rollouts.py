"""Are the samples those of the policy that learns from them."""

from __future__ import annotations

from reinforge.watch.doctor.history import RunHistory, Window
from reinforge.watch.doctor.trouble import Knob, Trouble

DISAGREE = 0.02  # mean |log p of the trainer - log p of the engine|; bfloat16 has about 0.01
MOVED = 0.08  # ... where the policy has moved in between
OUTSIDE = 0.05  # share of tokens whose ratio is outside [1/2, 2]
LEAST_ESS = 0.8  # effective sample size
# ... from which on all samples weigh nearly the same, whatever their mean difference: a 7B of
# random weights in bfloat16 has 0.052 nats and 0.9957
HARMLESS_ESS = 0.995
THROWN_AWAY = 0.25  # share of sampled tokens that were too old to be trained


def _apart(history: RunHistory, limit: float) -> list[Window]:
    """What shows that engine and trainer are apart, by `limit` nats; nothing where they are not."""
    mean = history.late("mismatch/mean", 3)
    outside = history.late("mismatch/outside_2x", 3)
    ess = history.late("mismatch/ess", 3)
    if mean is None or outside is None:
        return []
    spread = 0.0 if ess is None else ess.mean
    far = mean.mean > limit and spread < HARMLESS_ESS
    bad = far or outside.mean > OUTSIDE or (ess is not None and spread < LEAST_ESS)
    return [w for w in (mean, outside, ess) if w is not None] if bad else []


def mismatch(history: RunHistory) -> Trouble | None:
    """Without staleness nothing but the computation can differ."""
    age = history.window("rollout/staleness")
    windows = _apart(history, DISAGREE)
    if not windows or (age is not None and age.mean > 0):
        return None
    changed = [
        key
        for key in ("rollout.precision", "rollout.cache_precision")
        if history.setting(key, "model") != "model"
    ]
    knob = Knob(changed[0], "model", history.setting(changed[0])) if changed else None
    return Trouble(
        "mismatch",
        f"Engine and trainer disagree: {windows[0].mean:.3g} nats per token on average"
        f" ({windows[1].mean:.0%} of the tokens by more than a factor of 2). The gradient is that"
        " of another policy.",
        (f"Set {changed[0]}=model. " if changed else "`reinforge runs mismatch RUN` says why. ")
        + "algorithm.correction.name=tis weighs it off.",
        since=windows[0].steps[0],
        knob=knob or Knob("algorithm.correction.name", "tis"),
        evidence=tuple(map(str, windows)),
    )


def stale(history: RunHistory) -> Trouble | None:
    age = history.late("rollout/staleness", 3)
    allowed = history.setting("rollout.staleness", 0)
    thrown = history.late("tokens/stale", 3)
    sampled = history.late("tokens/sampled", 3)
    wasted = thrown.mean / sampled.mean if thrown and sampled and sampled.mean else 0.0
    windows = _apart(history, MOVED) if age is not None and age.mean > 0 else []
    if not windows and wasted < THROWN_AWAY:
        return None
    knob = Knob("rollout.staleness", max(1, allowed // 2) if allowed > 1 else 0, allowed)
    if windows:
        assert age is not None
        what = (
            f"Samples are {age.mean:.2g} steps old when they are trained, and the policy has moved"
            f" {windows[0].mean:.3g} nats per token since ({windows[1].mean:.0%} of the tokens by"
            " more than a factor of 2)."
        )
    else:
        what = f"{wasted:.0%} of the sampled tokens were too old to be trained and thrown away."
    return Trouble(
        "stale",
        what,
        "Lower rollout.staleness or train.learning_rate; algorithm.correction.name=tis weighs old"
        " samples off.",
        since=(age or thrown or windows[0]).steps[0],  # type: ignore[union-attr]
        knob=knob,
        evidence=tuple(map(str, [w for w in (age, *windows) if w is not None])),
    )
