"""From the answers to one prompt to what is trained of them: pairs, matches against an opponent,
or the best.

A pick is `fn(group, **settings) -> samples`; neighbours are units of the loss (chosen, rejected).
Answers that could not be scored, failed or are not to be trained take no part. What a loss must
know of a whole answer is a stream that is constant over its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from reinforge.algorithms.losses.rows import with_stream
from reinforge.core.errors import InputError
from reinforge.core.sample import Group, Sample

OPPONENT = "by_reference"  # stream: 1 on answers of the opponent, 0 on the policy's own


def best_and_worst(group: Group, *, margin: float = 0.0) -> list[Sample]:
    """The answer with the highest reward against that with the lowest, if they differ by more than
    `margin` (online DPO, 2402.04792).
    """
    usable = _whole(_usable(group.samples))
    if not usable:
        return []
    best = max(usable, key=_reward)
    worst = min(usable, key=_reward)
    return _pair(best, worst, margin)


def against_opponent(group: Group, *, margin: float = 0.0) -> list[Sample]:
    """The i-th answer of the policy against the i-th of the opponent; the better one is chosen, a
    tie is no pair (xpo, 2405.21046).
    """
    ordered = [
        (one, other) if _reward(one) >= _reward(other) else (other, one)
        for one, other in _matches(group)
    ]
    return [s for better, worse in ordered for s in _pair(better, worse, margin)]


def self_play(group: Group) -> list[Sample]:
    """The data's answer is chosen, every sampled one rejected (SPIN, 2401.01335); one that is the
    data's answer teaches nothing.
    """
    given = group.given
    assert given is not None, f"group {group.row.id} has no answer of the data's"
    others = _whole(
        [s for s in group.samples if s.n_trained and not torch.equal(s.tokens, given.tokens)]
    )
    return [s for other in others for s in (given, other)]


def win_rates(group: Group, *, wins: Literal["sigmoid", "hard"] = "sigmoid") -> list[Sample]:
    """The policy's answers, each with the probability that it beats the opponent's as stream `wins`
    (Nash-MD, 2312.00886): sigma of the difference of rewards, which a Bradley-Terry reward model
    means; or, hard, 1, 1/2 or 0.
    """
    if wins not in ("sigmoid", "hard"):
        raise InputError(
            f"{wins!r} is no way to count wins.",
            where="algorithm.options.wins",
            fix="There are: sigmoid, hard.",
        )
    found = []
    for own, other in _matches(group):
        gap = _reward(own) - _reward(other)
        hard = 0.5 if gap == 0 else float(gap > 0)
        found.append(with_stream(own, "wins", hard if wins == "hard" else _sigmoid(gap)))
    return found


def keep_best(
    group: Group, *, keep: int | None = 1, threshold: float | None = 0.0, distinct: bool = True
) -> list[Sample]:
    """The `keep` best answers (None: all) whose reward is above `threshold` (None: any).

    `distinct`: equal answers count once.
    """
    # stable: of equal rewards the first
    ranked = sorted(_usable(group.samples), key=_reward, reverse=True)
    passed = [s for s in ranked if threshold is None or _reward(s) > threshold]
    if distinct:
        first: dict[bytes, Sample] = {}
        for s in passed:
            first.setdefault(s.tokens.numpy().tobytes(), s)
        passed = list(first.values())
    episodes = list(dict.fromkeys(s.episode for s in passed))[:keep]
    return [s for s in passed if s.episode in episodes]


PICKS: dict[str, Callable[..., list[Sample]]] = {
    "best_and_worst": best_and_worst,
    "against_opponent": against_opponent,
    "self_play": self_play,
    "win_rates": win_rates,
    "keep_best": keep_best,
}


def _reward(sample: Sample) -> float:
    assert sample.reward is not None
    return sample.reward


def _usable(samples: Sequence[Sample]) -> list[Sample]:
    return [s for s in samples if s.reward is not None and s.n_trained]


def _whole(samples: list[Sample]) -> list[Sample]:
    """One side of a pair is one row."""
    if len({s.episode for s in samples}) < len(samples):
        raise InputError(
            "an answer that became several rows cannot be one side of a pair.",
            where="env",
            fix="Use an environment whose episodes stay one conversation, or best_of_n.",
        )
    return samples


def _matches(group: Group) -> list[tuple[Sample, Sample]]:
    """(policy, opponent): the i-th answer of one and the i-th of the other, where both
    can be used.
    """
    own, theirs = (
        [s for s in group.samples if float(s.streams[OPPONENT][-1]) == side] for side in (0.0, 1.0)
    )
    assert len(own) == len(theirs), "the opponent needs as many answers as the policy"
    return [(a, b) for a, b in zip(own, theirs, strict=True) if _usable([a]) and _usable([b])]


def _pair(better: Sample, worse: Sample, margin: float) -> list[Sample]:
    if not _reward(better) - _reward(worse) > margin or torch.equal(better.tokens, worse.tokens):
        return []
    return [with_stream(s, "score", _reward(s)) for s in (better, worse)]


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
