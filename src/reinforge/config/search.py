"""What a sweep may set one key to: a range of numbers, or one of several values.

log:1e-6..1e-4      a number, as likely in every power of ten
float:0..0.3        a number; float:0..0.3:0.1 in steps of 0.1
int:1..8            a whole number; int:2..16:2 in steps of 2
logint:1..64        a whole number, small ones as likely as large ones
choice:4,8,16       one of these; in a file also a list
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from reinforge.config.strict import clean, parse, scalar
from reinforge.core.errors import InputError

FORMS = "log:1e-6..1e-4, float:0..1, int:1..8, logint:1..64 or choice:a,b,c"
MOST_IN_GRID = 10_000


@dataclass(frozen=True)
class Interval:
    """The numbers from `low` to `high`, both included. `parse_domain` makes it."""

    low: float
    high: float
    whole: bool = False
    log: bool = False
    step: float | None = None

    def ends(self) -> list[Any]:
        """Values to try a configuration with."""
        return [self.low, self.high]

    def listed(self) -> list[Any] | None:
        """All of them, where they can be counted."""
        step = self.step or (1 if self.whole else None)
        if step is None:
            return None
        count = math.floor((self.high - self.low) / step + 1e-9) + 1
        return [self.low + i * step for i in range(min(count, MOST_IN_GRID + 1))]


@dataclass(frozen=True)
class ValueChoice:
    """One of several values, of any kind that a configuration has. `parse_domain` makes it."""

    values: tuple[Any, ...]

    def ends(self) -> list[Any]:
        return list(self.values)

    def listed(self) -> list[Any]:
        return list(self.values)


Domain = Interval | ValueChoice


def parse_domain(given: Any, where: str) -> Domain:
    """What a user wrote for one key. `where` names the key for errors.

    >>> parse_domain("int:2..8:2", "")
    Interval(low=2, high=8, whole=True, log=False, step=2)
    >>> parse_domain("choice:4,true,low", "")
    ValueChoice(values=(4, True, 'low'))
    """
    if isinstance(given, list):
        return _choice(given, where)
    kind, colon, text = str(given).partition(":")
    if not isinstance(given, str) or not colon:
        raise InputError(f"{given!r} is no range.", where=where, fix=f"Write {FORMS}.")
    if kind == "choice":
        found = parse(f"[{clean(text, where=where)}]", where)[0]
        return _choice(found, where)
    if kind not in ("log", "float", "int", "logint"):
        raise InputError(f"{kind!r} is no kind of range.", where=where, fix=f"Write {FORMS}.")
    return _interval(kind, text, where)


def _choice(values: list[Any], where: str) -> ValueChoice:
    texts = [json.dumps(value, sort_keys=True) for value in values]
    if len(texts) < 2:
        raise InputError(
            f"a choice of {len(texts)} value{'s' if not texts else ''}.",
            where=where,
            fix="Give two or more, e.g. choice:4,8,16.",
        )
    if twice := [text for text in texts if texts.count(text) > 1]:
        raise InputError(f"{twice[0]} is given twice.", where=where, fix="Give each value once.")
    return ValueChoice(tuple(values))


def _interval(kind: str, text: str, where: str) -> Interval:
    low_text, dots, rest = text.partition("..")
    high_text, _, step_text = rest.partition(":")
    if not dots:
        raise InputError(f"{text!r} has no end.", where=where, fix=f"Write {kind}:LOW..HIGH.")
    whole = kind in ("int", "logint")
    log = kind in ("log", "logint")
    low = _number(low_text, whole, where)
    high = _number(high_text, whole, where)
    step = _number(step_text, whole, where) if step_text else None
    if low >= high:
        what = "one value only" if low == high else "empty: it ends before it begins"
        raise InputError(
            f"the range {low_text}..{high_text} is {what}.",
            where=where,
            fix="Give the smaller number first, and a larger one after it.",
        )
    if log and low <= 0:
        raise InputError(
            f"a logarithmic range begins above 0, not at {low_text}.",
            where=where,
            fix=f"Give a larger number, or {'int' if whole else 'float'}:{text}.",
        )
    if step is not None and (log or not 0 < step <= high - low):
        raise InputError(
            f"the step {step_text} does not fit the range.",
            where=where,
            fix="A logarithmic range has none; of others it is above 0 and within the range.",
        )
    return Interval(low, high, whole, log, step)


def _number(text: str, whole: bool, where: str) -> float:
    found = scalar(text.strip(), where=where)
    right = isinstance(found, int) if whole else isinstance(found, int | float)
    if not right or isinstance(found, bool):
        kind = "whole number" if whole else "number"
        raise InputError(f"{text!r} is no {kind}.", where=where, fix=f"Write {FORMS}.")
    return found if whole else float(found)
