"""Two models on the same problems: is one better, and how many problems would show it?

The problems are paired: of each its mean score over the answers (and seeds) of a model, and the
difference of the two. What varies between problems alike for both models drops out, so a pair needs
fewer problems than two intervals that do not touch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reinforge.core.errors import InputError
from reinforge.evals.statistics import Z95

POWER = 0.8  # of the test whose size is computed
Z_POWER = 0.8416212335729143

Scores = Mapping[str, Sequence[float]]  # of the answers to each problem, all seeds together


@dataclass(frozen=True)
class PairedComparison:
    """What a paired comparison found. `compare_paired` makes it."""

    problems: int  # that both have answered
    answers: tuple[int, int]  # of all of them
    means: tuple[float, float]
    difference: float  # of the second to the first
    low: float  # 95% interval of the difference
    high: float
    better: int  # problems that the second does better
    worse: int
    needed: int | None  # problems for a difference like this to be seen in 80% of trials
    left_out: int  # problems that only one has

    @property
    def told(self) -> bool:
        """Whether the interval leaves 0 out."""
        return self.low > 0 or self.high < 0


def compare_paired(first: Scores, second: Scores) -> PairedComparison:
    """The second model against the first.

    The interval is that of the mean of paired differences (normal; Student's factor below 30
    problems is approximated by Cornish and Fisher).
    """
    shared = sorted(first.keys() & second.keys())
    if len(shared) < 2:
        raise InputError(
            f"{len(shared)} problems have answers of both.",
            where="compare",
            fix="Ask both models the same problems: the ids of rows must agree.",
        )
    ours = [_mean(first[name]) for name in shared]
    theirs = [_mean(second[name]) for name in shared]
    differences = [b - a for a, b in zip(ours, theirs, strict=True)]
    n = len(shared)
    mean = _mean(differences)
    spread = math.sqrt(sum((d - mean) ** 2 for d in differences) / (n - 1))
    margin = _student(n - 1) * spread / math.sqrt(n)
    return PairedComparison(
        problems=n,
        answers=(sum(len(first[p]) for p in shared), sum(len(second[p]) for p in shared)),
        means=(_mean(ours), _mean(theirs)),
        difference=mean,
        low=mean - margin,
        high=mean + margin,
        better=sum(d > 0 for d in differences),
        worse=sum(d < 0 for d in differences),
        needed=problems_needed(mean, spread),
        left_out=len(first.keys() ^ second.keys()),
    )


def problems_needed(difference: float, spread: float) -> int | None:
    """Problems with which a true difference of this size is told from 0 (95%, two-sided) in 80% of
    trials; `spread` is the standard deviation of paired differences. None: there is no difference.

    >>> problems_needed(0.05, 0.5), problems_needed(0.02, 0.5)
    (785, 4906)
    >>> problems_needed(0.0, 0.5) is None
    True
    """
    if difference == 0:
        return None
    return max(2, math.ceil(((Z95 + Z_POWER) * spread / difference) ** 2))


def _student(degrees: int) -> float:
    """The 97.5% point of Student's distribution, by the expansion of Cornish and Fisher.

    >>> round(_student(10), 2), round(_student(100), 3)
    (2.23, 1.984)
    """
    z, v = Z95, degrees
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
