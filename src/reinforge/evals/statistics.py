"""Numbers about a small number of trials, honestly."""

from __future__ import annotations

import math
from collections.abc import Sequence

Z95 = 1.959963984540054


def wilson(successes: float, trials: int) -> tuple[float, float]:
    """The 95% Wilson score interval of a proportion (Wilson 1927).

    Never leaves [0, 1], sane at 0 and at n, where one bound is exact.

    >>> low, high = wilson(5, 10); round(low, 4), round(high, 4)
    (0.2366, 0.7634)
    >>> wilson(0, 7)[0], wilson(7, 7)[1]
    (0.0, 1.0)
    """
    if trials == 0:
        return 0.0, 1.0
    p = successes / trials
    centre = p + Z95**2 / (2 * trials)
    spread = Z95 * math.sqrt(p * (1 - p) / trials + Z95**2 / (4 * trials**2))
    scale = 1 + Z95**2 / trials
    # at 0 and at n centre and spread differ by rounding alone
    low = 0.0 if p <= 0 else max(0.0, (centre - spread) / scale)
    high = 1.0 if p >= 1 else min(1.0, (centre + spread) / scale)
    return low, high


def pass_at_k(correct: Sequence[int], samples: int, k: int) -> float:
    """Mean over problems of the unbiased 1 − C(n−c, k)/C(n, k) (2107.03374), from c of n correct
    samples each.

    >>> pass_at_k([1, 0], 2, 1), pass_at_k([1, 0], 2, 2)
    (0.25, 0.5)
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples per problem, there are {samples}")
    return sum(1 - math.comb(samples - c, k) / math.comb(samples, k) for c in correct) / max(
        1, len(correct)
    )
