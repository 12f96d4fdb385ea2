"""Is it learning? An answer from the numbers that say so, and a word on the one that does not: the
loss of a policy gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from reinforge.watch.doctor.history import CLEARLY, SCORED, RunHistory, Window, change

NEAR_ZERO = 0.01
# what rises, or falls, where something is learned: the first that a run has decides
SIGNS = (
    ("reward/mean", 1),
    ("rewards/margin", 1),
    ("reward/accuracy", 1),
    ("train/loss", -1),
)
WORDS = {1: "", 0: ": no more than chance", -1: ": worse"}  # by vote
# where evaluations say that it learns, and training does not
STILL_IN_TRAINING = ": hardly moves, but evaluation does, and counts more"
UNBOUNDED = ": without an interval this may be chance"


@dataclass(frozen=True, slots=True)
class LearningVerdict:
    """`answer`: yes, no, not yet, or too early to say; of a run that has ended, not clearly, or
    too few steps to say. With what it rests on.
    """

    answer: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Sign:
    """What evaluations or training say, for `is_learning`: 1 that it learns, -1 that it became
    worse, 0 neither; how far they moved, and a word on it.
    """

    vote: int
    moved: str
    word: str = ""


def is_learning(history: RunHistory, *, ended: bool = False) -> LearningVerdict:
    """What evaluations say counts first, then the reward, or the loss of supervised training. A
    rise of evaluations without intervals counts for nothing where training stands still.
    """
    trained = _training(history)
    evaluated = _evaluations(history, still=trained is not None and trained.vote == 0)
    if trained is not None and trained.vote == 0 and evaluated is not None and evaluated.vote > 0:
        trained = replace(trained, word=STILL_IN_TRAINING)
    signs = [sign for sign in (evaluated, trained) if sign is not None]
    reasons = [f"{sign.moved}{sign.word}" for sign in signs]
    norms = history.window("train/grad_norm")
    if norms is not None:
        moved = sum(value > 0 for value in norms.values)
        reasons.append(f"a gradient in {moved} of {len(history)} steps (norm {norms.mean:.3g})")
    reasons += _about_loss(history)
    return LearningVerdict(_answer([sign.vote for sign in signs], norms, ended), tuple(reasons))


def _evaluations(history: RunHistory, *, still: bool) -> _Sign | None:
    """`still`: training did not move by more than chance."""
    scores = history.evaluations()
    if len(scores) < 2:
        return None
    first, last = scores[0], scores[-1]
    name = "eval/accuracy" if "eval/accuracy" in history.scores else "eval/reward"
    moved = f"{name} {first.value:.3g} (step {first.step}) -> {last.value:.3g} (step {last.step})"
    if history.improves():
        doubtful = still and not history.surely_improves()
        return _Sign(0, moved, UNBOUNDED) if doubtful else _Sign(1, moved)
    return _Sign(-1 if history.worsens() else 0, moved)


def _training(history: RunHistory) -> _Sign | None:
    for name, sign in SIGNS:
        if (both := history.ends(name)) is not None:
            far = sign * history.trend(name)
            vote = 1 if far > CLEARLY else -1 if far < -CLEARLY else 0
            return _Sign(vote, change(*both), WORDS[vote])
    return None


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
