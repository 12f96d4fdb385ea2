"""What came of asking a reward: scores, and how many are missing because it hung or died. No torch
here: workers import this."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from reinforge.core.errors import InputError

LARGEST = 1e16  # of a reward: the square of a larger one, summed over a batch, is no float32


@dataclass(frozen=True)
class RewardOutcome:
    """One score per completion; None = could not be scored. What depends on the clock is counted
    and never becomes a 0.

    A None is one of two things: the reward has nothing to say about this completion, or it should
    have said something and did not (`lost`). The first leaves the total to the other rewards; the
    second leaves the sample without a total.
    """

    scores: list[float | None]
    timeouts: int = 0  # scores that are None because the reward took too long
    crashes: int = 0  # ... because the process that computed them died, or met its limit of memory
    sandbox: int = 0  # ... because the sandbox failed
    unsafe: int = 0  # scores of programs that ran without containment
    # places of scores that should be there; None: every None, if any of the above is counted
    lost: frozenset[int] | None = None
    # of each completion, what the heads of an attribute model say; none: it is no such reward
    attributes: list[dict[str, float]] = field(default_factory=list)

    @property
    def places_lost(self) -> frozenset[int]:
        if self.lost is not None:
            return self.lost
        failed = self.timeouts or self.crashes or self.sandbox
        return frozenset(i for i, score in enumerate(self.scores) if score is None and failed)

    @property
    def marked(self) -> list[float | None]:
        """The scores, with NaN for those that are lost: `combine.combined` reads it."""
        lost = self.places_lost
        return [
            math.nan if score is None and i in lost else score
            for i, score in enumerate(self.scores)
        ]

    @classmethod
    def joined(cls, parts: Iterable[RewardOutcome]) -> RewardOutcome:
        parts = list(parts)
        counts = {
            name: sum(getattr(p, name) for p in parts)
            for name in ("timeouts", "crashes", "sandbox", "unsafe")
        }
        marked = [score for p in parts for score in p.marked]
        lost = frozenset(
            i for i, score in enumerate(marked) if score is not None and math.isnan(score)
        )
        whole = cls(
            [None if i in lost else score for i, score in enumerate(marked)],
            **counts,
            attributes=[named for p in parts for named in p.attributes],
        )
        return whole if whole.places_lost == lost else replace(whole, lost=lost)


def checked(name: str, result: Any, count: int) -> list[float | None]:
    """The scores that a reward returned, each finite or None. Anything else is an error of the
    reward."""
    if hasattr(result, "tolist"):
        result = result.tolist()
    if not isinstance(result, (list, tuple)) or len(result) != count:
        got = (
            f"{len(result)} values"
            if isinstance(result, (list, tuple))
            else f"a {type(result).__name__}"
        )
        raise InputError(
            f"reward {name} returned {got} for {count} completions.",
            where="rewards",
            fix="Return a list with one number or None per completion.",
        )
    return [None if value is None else _number(name, value) for value in result]


def _number(name: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except OverflowError:  # an int that no float is near
        number = math.inf
    if math.isnan(number) or value in (math.inf, -math.inf):
        raise InputError(
            f"reward {name} returned {value!r}.",
            where="rewards",
            fix="Return finite numbers, or None for a completion that cannot be scored.",
        )
    within(number, f"reward {name} returned")
    return number


def within(number: float, said: str) -> None:
    """Raises InputError for a reward that is too large to train on."""
    if abs(number) > LARGEST:
        raise InputError(
            f"{said} {number:.3g}: beyond {LARGEST:.0e} advantages overflow.",
            where="rewards",
            fix="Scale it down, e.g. to 0 to 1; a logarithm keeps the order.",
        )
