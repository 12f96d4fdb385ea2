"""How the policy moves: entropy, KL to the reference, clipped ratios."""

from __future__ import annotations

from reinforge.watch.doctor.history import RunHistory, change
from reinforge.watch.doctor.trouble import Knob, Trouble

GONE = 0.2  # share of the entropy of the start that is left
DETERMINISTIC = 0.1  # nats: so little leaves nothing to compare. Rows without signal are not in it
TIED = 0.6  # share of groups whose rewards are all equal
NEARLY_ALL = 0.8  # of the reward there is to get
ROSE = 1.4
FAR = 0.3  # nats per token from the reference
ABOVE_TARGET = 3.0  # times algorithm.kl.target
BELOW_ZERO = 1e-3  # nats; rounding is far less
MOST_CLIPPED = 0.4
USUAL_UPDATES = 4  # of one batch: with more, what is clipped is their number's fault
PAID_LENGTH = 0.5  # correlation of reward and length from which on length is what is paid for


def entropy_collapse(history: RunHistory) -> Trouble | None:
    entropy = history.ends("policy/entropy")
    ties = history.late("groups/zero_variance")
    reward = history.late("reward/mean")
    if entropy is None or ties is None or reward is None or ties.mean < TIED:
        return None
    most = history.most_reward()
    if most is not None and reward.mean > NEARLY_ALL * most:
        return None
    early, late = entropy
    warm = history.setting("rollout.temperature", 1.0)
    whole = history.window("policy/entropy")
    assert whole is not None
    if whole.median < DETERMINISTIC and warm < 1:
        what = (
            f"Answers are sampled almost greedily (rollout.temperature {warm:g}; the median entropy"
            f" is {whole.median:.2g} nats per token)"
        )
        fix = (
            "Raise rollout.temperature, 1 is usual: a group teaches something only where its"
            " answers differ."
        )
        since = history.steps[0]
        knob = Knob("rollout.temperature", 1.0, warm)
    elif late.mean < GONE * early.mean:
        what = f"Entropy collapsed from {early.mean:.3g} to {late.mean:.3g} nats per token"
        fix = (
            "Keep it exploring: an entropy bonus (algorithm.entropy, or algorithm.entropy_target),"
            " a larger algorithm.clip.high, a lower train.learning_rate."
        )
        since = late.steps[0]
        bonus = history.setting("algorithm.entropy", 0.0)
        knob = Knob("algorithm.entropy", 3 * bonus or 0.01, bonus)
    else:
        return None
    return Trouble(
        "entropy_collapse",
        f"{what} at a reward of {reward.mean:.3g}: in {ties.mean:.0%} of the groups all answers get"
        " the same, and nothing better is found any more.",
        fix,
        since=since,
        knob=knob,
        evidence=(change(early, late), str(ties), str(reward)),
    )


def entropy_explosion(history: RunHistory) -> Trouble | None:
    entropy = history.ends("policy/entropy")
    rewards = history.ends("reward/mean")
    if entropy is None or rewards is None or history.rises():
        return None
    early, late = entropy
    if late.mean < ROSE * early.mean or not history.rises("policy/entropy"):
        return None
    bonus = history.setting("algorithm.entropy", 0.0)
    rate = history.setting("train.learning_rate")
    paid = history.window("response/length_correlation")
    if not bonus and paid is not None and abs(paid.mean) > PAID_LENGTH:
        return None  # answers grow or shrink, and that is told
    return Trouble(
        "entropy_explosion",
        f"Entropy rose from {early.mean:.3g} to {late.mean:.3g} nats per token, and the reward"
        f" did not ({rewards[0].mean:.3g} -> {rewards[1].mean:.3g}): answers become noise.",
        "Lower the entropy bonus (algorithm.entropy)."
        if bonus
        else "Lower train.learning_rate, and look at the rewards: noise is paid for.",
        since=late.steps[0],
        knob=(
            Knob("algorithm.entropy", bonus / 10, bonus)
            if bonus
            else None
            if rate is None
            else Knob("train.learning_rate", rate / 3, rate)
        ),
        evidence=(change(early, late), change(*rewards)),
    )


def kl_negative(history: RunHistory) -> Trouble | None:
    kl = history.window("policy/kl")
    if kl is None or len(kl.values) < 5 or kl.mean > -BELOW_ZERO:
        return None
    below = [step for step, value in zip(kl.steps, kl.values, strict=True) if value < 0]
    if len(below) * 2 < len(kl.values):
        return None
    estimator = history.setting("algorithm.kl.estimator")
    return Trouble(
        "kl_negative",
        f"policy/kl is below 0 in {len(below)} of {len(kl.values)} steps (mean {kl.mean:.3g}),"
        " which a KL never is: the penalty pushes the policy away from its reference.",
        "Take an estimator that cannot be negative (algorithm.kl.estimator=k3). Under k1 it also"
        " means that the samples are not the policy's own: look at rollout.staleness and"
        " algorithm.epochs.",
        since=below[0],
        knob=Knob("algorithm.kl.estimator", "k3", estimator),
        evidence=(str(kl),),
    )


def kl_runaway(history: RunHistory) -> Trouble | None:
    both = history.ends("policy/kl")
    if both is None:
        return None
    early, late = both
    target = history.setting("algorithm.kl.target")
    limit = FAR if target is None else ABOVE_TARGET * target
    if late.mean < max(limit, early.mean):
        return None
    weight = history.setting("algorithm.kl.coefficient", 0.0)
    return Trouble(
        "kl_runaway",
        f"The policy leaves its reference behind: {late.mean:.3g} nats of KL per token, and it was"
        f" {early.mean:.3g}. What the model could do before is being lost.",
        "Raise algorithm.kl.coefficient, or let algorithm.kl.target choose it; a lower"
        " train.learning_rate slows it down.",
        since=next(
            (s for s, v in zip(late.steps, late.values, strict=True) if v > limit), late.steps[0]
        ),
        knob=Knob("algorithm.kl.coefficient", max(10 * weight, 0.01), weight),
        evidence=(change(early, late),),
    )


def updates_per_batch(history: RunHistory) -> int:
    epochs = int(history.setting("algorithm.epochs", 1))
    return epochs * int(history.setting("algorithm.minibatches", 1))


def too_many_updates(history: RunHistory) -> bool:
    """Whether a step goes over its batch so often that most of it is clipped."""
    clipped = history.late("policy/clip_fraction")
    many = updates_per_batch(history) > USUAL_UPDATES
    return many and clipped is not None and clipped.mean > MOST_CLIPPED


def clip_share(history: RunHistory) -> Trouble | None:
    clipped = history.late("policy/clip_fraction")
    if clipped is None or clipped.mean <= MOST_CLIPPED:
        return None
    updates = updates_per_batch(history)
    low = history.setting("algorithm.clip.low")
    high = history.setting("algorithm.clip.high")
    narrow = min((c for c in (low, high) if c is not None), default=0.2) < 0.1
    return Trouble(
        "clip_share",
        f"{clipped.mean:.0%} of the tokens are clipped and teach nothing: the policy moves further"
        " in one step than the clip allows.",
        f"The clip is narrow (algorithm.clip: {low} and {high}): 0.2 is usual."
        if narrow
        else "Fewer updates per batch (algorithm.epochs, algorithm.minibatches: there are"
        f" {updates}), or a lower train.learning_rate.",
        since=clipped.steps[0],
        knob=(
            Knob("algorithm.clip.high", 0.2, high)
            if narrow
            else Knob("algorithm.epochs", 1, history.setting("algorithm.epochs"))
        ),
        evidence=tuple(
            str(window)
            for name in ("policy/clip_fraction", "policy/ratio/max")
            if (window := history.late(name)) is not None
        ),
    )
