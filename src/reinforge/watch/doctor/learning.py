"""Is it learning? An answer from the numbers that say so, and a word on the one that does not: the
loss of a policy gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reinforge.watch.doctor.history import CLEARLY, SCORED, RunHistory, Window, change

NEAR_ZERO = 0.01
# what rises, or falls, where something is learned: the first that a run has decides
SIGNS = (
    ("reward/mean", 1),
    ("rewards/margin", 1),
    ("reward/accuracy", 1),
    ("train/loss", -1),
)


@dataclass(frozen=True, slots=True)
class LearningVerdict:
    """`answer`: yes, no, not yet, or too early to say; of a run that has ended, not clearly, or
    too few steps to say. With what it rests on.
    """

    answer: str
    reasons: tuple[str, ...]


def is_learning(history: RunHistory, *, ended: bool = False) -> LearningVerdict:
    """What evaluations say counts first, then the reward, or the loss of supervised training."""
    reasons = []
    votes = []
    scores = history.evaluations()
    if len(scores) > 1:
        name = "eval/accuracy" if "eval/accuracy" in history.scores else "eval/reward"
        reasons.append(
            f"{name} {scores[0].value:.3g} (step {scores[0].step}) -> {scores[-1].value:.3g} (step"
            f" {scores[-1].step})"
        )
        votes.append(1 if history.improves() else -1 if history.worsens() else 0)
    for name, sign in SIGNS:
        if (both := history.ends(name)) is not None:
            far = sign * history.trend(name)
            votes.append(1 if far > CLEARLY else -1 if far < -CLEARLY else 0)
            reasons.append(f"{change(*both)}{_word(votes[-1])}")
            break
    norms = history.window("train/grad_norm")
    if norms is not None:
        moved = sum(value > 0 for value in norms.values)
        reasons.append(f"a gradient in {moved} of {len(history)} steps (norm {norms.mean:.3g})")
    reasons += _about_loss(history)
    return LearningVerdict(_answer(votes, norms, ended), tuple(reasons))


def _answer(votes: Sequence[int], norms: Window | None, ended: bool) -> str:
    if norms is not None and not any(norms.values):
        return "no"
    if not votes:
        return "too few steps to say" if ended else "too early to say"
    if min(votes) < 0:
        return "no"
    if max(votes) > 0:
        return "yes"
    return "not clearly" if ended else "not yet"


def _word(vote: int) -> str:
    return {1: "", 0: ": no more than chance", -1: ": worse"}[vote]


def _about_loss(history: RunHistory) -> list[str]:
    """Of a loss near 0 that is no sign of anything."""
    loss: Window | None = history.window("train/loss")
    norms = history.window("train/grad_norm")
    if loss is None or history.window(SCORED) is None or abs(loss.mean) > NEAR_ZERO:
        return []
    if norms is None or not any(norms.values):
        return [f"train/loss {loss.mean:.2g}, and no gradient"]
    return [
        f"train/loss {loss.mean:.2g} says nothing: advantages sum to 0 and the ratio is 1, so the"
        " loss of a policy gradient is about 0 while its gradient is not"
    ]
