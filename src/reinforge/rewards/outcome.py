"""What came of asking a reward: scores, and how many are missing because it hung or died. No torch here: workers import this."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from reinforge.core.errors import InputError


@dataclass(frozen=True)
class Outcome:
    """One score per completion; None = could not be scored. What depends on the clock is counted and never becomes a 0."""

    scores: list[float | None]
    timeouts: int = 0  # scores that are None because the reward took too long
    crashes: int = 0  # ... because the process that computed them died, or met its limit of memory
    sandbox: int = 0  # ... because the sandbox failed
    unsafe: int = 0  # scores of programs that ran without containment

    @classmethod
    def joined(cls, parts: Iterable[Outcome]) -> Outcome:
        parts = list(parts)
        counts = {name: sum(getattr(p, name) for p in parts) for name in ("timeouts", "crashes", "sandbox", "unsafe")}
        return cls([s for p in parts for s in p.scores], **counts)


def checked(name: str, result: Any, count: int) -> list[float | None]:
    """The scores that a reward returned, each finite or None. Anything else is an error of the reward."""
    if hasattr(result, "tolist"):
        result = result.tolist()
    if not isinstance(result, (list, tuple)) or len(result) != count:
        got = f"{len(result)} values" if isinstance(result, (list, tuple)) else f"a {type(result).__name__}"
        raise InputError(
            f"reward {name} returned {got} for {count} completions.",
            where="rewards",
            fix="Return a list with one number or None per completion.",
        )
    out: list[float | None] = []
    for value in result:
        if value is not None and (isinstance(value, (str, bytes)) or not math.isfinite(float(value))):
            raise InputError(
                f"reward {name} returned {value!r}.",
                where="rewards",
                fix="Return finite numbers, or None for a completion that cannot be scored.",
            )
        out.append(None if value is None else float(value))
    return out
