"""Does the reward pay for the task, or for a way around it."""

from __future__ import annotations

from reinforge.watch.doctor.history import EvalScore, RunHistory, change
from reinforge.watch.doctor.rules.policy import PAID_LENGTH
from reinforge.watch.doctor.trouble import Knob, Trouble

DOMINATES = 0.5  # share of all answers that one text has
NEW = 0.2  # by how much that share has risen
LONGER = 1.3


def reward_hacking(history: RunHistory) -> Trouble | None:
    """A reward that rises by one text for every prompt, or by length alone. An evaluation with the
    same reward is deceived by the first as training is; of lengths it may tell.
    """
    if not history.rises():
        return None
    return _one_answer(history) or (None if history.improves() else _length(history))


def _one_answer(history: RunHistory) -> Trouble | None:
    shares = history.ends("response/repeated")
    rewards = history.ends("reward/mean")
    if shares is None or rewards is None:
        return None
    early, late = shares
    if late.mean < DOMINATES or late.mean - early.mean < NEW:
        return None
    return Trouble(
        "reward_hacking",
        f"One and the same text is {late.mean:.0%} of the answers to different prompts, and the"
        f" reward rose from {rewards[0].mean:.3g} to {rewards[1].mean:.3g} meanwhile: the reward"
        " may pay for something that is not the task.",
        "Read the samples. If that text is no answer, make the reward read the answer.",
        since=late.steps[0],
        evidence=(change(early, late), change(*rewards)),
    )


def _length(history: RunHistory) -> Trouble | None:
    lengths = history.ends("response/length")
    paid = history.window("response/length_correlation")
    rewards = history.ends("reward/mean")
    if lengths is None or paid is None or rewards is None:
        return None
    early, late = lengths
    if paid.mean < PAID_LENGTH or late.mean < LONGER * early.mean:
        return None
    return Trouble(
        "reward_hacking",
        f"Longer answers get more: reward and length have a correlation of {paid.mean:.2f} between"
        f" answers to one prompt, and answers grew from {early.mean:.3g} to {late.mean:.3g} tokens"
        f" while the reward rose from {rewards[0].mean:.3g} to {rewards[1].mean:.3g}.",
        "Take length out of the reward, or price it: algorithm.overlong_buffer takes reward from"
        " the longest answers.",
        since=late.steps[0],
        knob=Knob("algorithm.overlong_buffer", max(1, round(late.mean / 2))),
        evidence=(str(paid), change(early, late), change(*rewards)),
    )


def overoptimised(history: RunHistory) -> Trouble | None:
    """Evaluation falls while the reward of training rises."""
    both = history.ends("reward/mean")
    fall = fallen(history.evaluations())
    if both is None or fall is None or not history.rises():
        return None
    best, last = fall
    rate = history.setting("train.learning_rate")
    return Trouble(
        "overoptimised",
        f"The reward of training rose from {both[0].mean:.3g} to {both[1].mean:.3g} while"
        f" evaluation fell from {best.value:.3g} (step {best.step}) to {last.value:.3g} (step"
        f" {last.step}): what is rewarded is not what is evaluated.",
        "Compare answers of training and of evaluation, and the rewards of both; hold the policy"
        " nearer to its start; run.checkpoint.best=eval/accuracy keeps the best weights.",
        since=best.step,
        knob=(
            Knob("algorithm.kl.coefficient", 0.05)
            if not history.setting("algorithm.kl.coefficient")
            else None
            if rate is None
            else Knob("train.learning_rate", rate / 3, rate)
        ),
        evidence=(change(*both), f"eval/accuracy {best.value:.3g} -> {last.value:.3g}"),
    )


def collapse(history: RunHistory) -> Trouble | None:
    """Evaluation fell from its best, whatever the reward did."""
    fall = fallen(history.scores.get("eval/accuracy", []))
    if fall is None:
        return None
    best, last = fall
    rate = history.setting("train.learning_rate")
    return Trouble(
        "collapse",
        f"eval/accuracy fell from {best.value:.1%} (step {best.step}) to {last.value:.1%} (step"
        f" {last.step}).",
        "Lower train.learning_rate or raise algorithm.kl.coefficient;"
        " run.checkpoint.best=eval/accuracy keeps the best weights.",
        since=best.step,
        knob=None if rate is None else Knob("train.learning_rate", rate / 3, rate),
    )


def fallen(scores: list[EvalScore]) -> tuple[EvalScore, EvalScore] | None:
    """The best evaluation and the last one, where the last is clearly worse: by their intervals,
    or, where there are none, by half.
    """
    if not scores:
        return None
    best = max(scores, key=lambda score: score.value)
    last = scores[-1]
    worse = (
        last.value < best.value / 2
        if last.high is None or best.low is None
        else last.high < best.low
    )
    return (best, last) if worse else None
