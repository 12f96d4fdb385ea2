"""How long answers are: cut off, or growing and shrinking without need."""

from __future__ import annotations

from reinforge.watch.doctor.history import RunHistory, change
from reinforge.watch.doctor.trouble import Knob, Trouble

MANY_CUT = 0.3  # share of answers that the limit cuts off
COSTS = 0.1  # of the reward there is to get, that an answer loses by being cut
GREW = 1.5
SHRANK = 0.6
SOME_TOKENS = 16  # a limit below it is raised to it


def truncation(history: RunHistory) -> Trouble | None:
    """Many answers are cut off, from the start, and that costs them their reward. Where cut answers
    get as much as others, the limit is part of the task; where answers grew into the limit, that
    is what is wrong.
    """
    whole = history.window("response/truncated")
    cut = history.late("response/truncated", 3)
    rewards = history.late("reward/mean", 3)
    theirs = history.late("response/truncated_reward", 3)
    if whole is None or cut is None or rewards is None or theirs is None:
        return None
    if cut.mean < MANY_CUT or whole.values[0] < MANY_CUT / 2:
        return None
    most = history.most_reward() or 1.0
    all_cut = cut.mean > 0.95
    complete = None if all_cut else (rewards.mean - cut.mean * theirs.mean) / (1 - cut.mean)
    if complete is None:
        if theirs.mean > COSTS * most:
            return None
        told = "and no complete one is left to compare"
    else:
        if complete - theirs.mean < COSTS * most:
            return None
        told = f"and complete ones {complete:.3g}"
    limit = history.setting("rollout.max_new_tokens")
    first = next(i for i, value in enumerate(whole.values) if value >= MANY_CUT)
    kept = "" if all_cut else "; algorithm.overlong=mask keeps cut answers from being trained"
    return Trouble(
        "truncation",
        f"{cut.mean:.0%} of the answers are cut off by the token limit; they get"
        f" {theirs.mean:.3g} on average, {told}.",
        "Raise rollout.max_new_tokens until most answers end by themselves; if they never do, look"
        f" at the chat template and rollout.stop{kept}.",
        since=whole.steps[first],
        knob=None if limit is None else Knob("rollout.max_new_tokens", _longer(limit), limit),
        evidence=(str(cut), str(theirs), str(rewards)),
    )


def _longer(limit: float) -> float:
    """Twice as many tokens; of very few it is not known how many would do."""
    return max(2 * limit, SOME_TOKENS)


def length_drift(history: RunHistory) -> Trouble | None:
    """Answers become much longer or shorter, and neither reward nor evaluation follows."""
    lengths = history.ends("response/length")
    rewards = history.ends("reward/mean")
    if lengths is None or rewards is None or history.rises() or history.improves():
        return None
    early, late = lengths
    if SHRANK * early.mean < late.mean < GREW * early.mean or not early.mean:
        return None
    longer = late.mean > early.mean
    paid = history.window("response/length_correlation")
    return Trouble(
        "length_drift",
        f"Answers {'grew' if longer else 'shrank'} from {early.mean:.3g} to {late.mean:.3g} tokens,"
        f" and the reward did not follow ({rewards[0].mean:.3g} -> {rewards[1].mean:.3g}).",
        "Look at how the loss counts tokens (algorithm.reduce: sequence_mean favours long wrong"
        " answers, fixed_length does not), and for a reward that hides a length.",
        since=late.steps[0],
        knob=Knob("algorithm.reduce", "fixed_length", history.setting("algorithm.reduce")),
        evidence=(
            change(early, late),
            change(*rewards),
            *(() if paid is None else (str(paid),)),
        ),
    )
