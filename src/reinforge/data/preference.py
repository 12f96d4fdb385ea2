"""Rows that compare answers: {prompt, chosen, rejected}, and the same as whole conversations or
whole texts. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from reinforge.core.errors import InputError


def with_prompt(record: dict[str, Any], place: str) -> dict[str, Any]:
    """A record whose `chosen` and `rejected` are answers to its `prompt`.

    Where both begin with the question (conversations that begin with a turn of the user's, or texts
    without a prompt column) what they share becomes the prompt, and the rest are the answers: TRL's
    implicit format, and that of data sets that have both.
    """
    chosen = record.get("chosen")
    rejected = record.get("rejected")
    if chosen is None or rejected is None:
        return record
    if isinstance(chosen, list) != isinstance(rejected, list):
        raise InputError(
            "one of chosen and rejected is text and the other is messages",
            where=place,
            fix="Write both the same way.",
        )
    if isinstance(chosen, list) and _asks(chosen) and _asks(rejected):
        cut = _shared_messages(chosen, rejected)
    elif isinstance(chosen, str) and not any(record.get(name) for name in ("prompt", "question")):
        cut = _shared_text(chosen, rejected)
    else:
        return record
    if not cut or cut in (len(chosen), len(rejected)):
        what = (
            "have no beginning in common, so there is no prompt"
            if not cut
            else "are the same, or one is the beginning of the other"
        )
        raise InputError(
            f"chosen and rejected {what}",
            where=place,
            fix="Repair or remove the row, or give a prompt column.",
        )
    return {**record, "prompt": chosen[:cut], "chosen": chosen[cut:], "rejected": rejected[cut:]}


def _asks(messages: list[Any]) -> bool:
    return (
        bool(messages)
        and isinstance(messages[0], Mapping)
        and messages[0].get("role") != "assistant"
    )


def _shared_messages(a: list[Any], b: list[Any]) -> int:
    """How many messages both begin with; never the last turn of either."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))))


def _shared_text(a: str, b: str) -> int:
    """How many characters both begin with, up to the end of a whole word: the blank before the
    first word that differs is the answer's.

    >>> _shared_text("Q: 2+2? A: four", "Q: 2+2? A: five")
    10
    """
    n = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))))
    while n and not a[n - 1].isspace():
        n -= 1
    return len(a[:n].rstrip())


def number(row: Mapping[str, Any], name: str, where: str) -> float:
    """A column that must be a number; text from a CSV file will do."""
    value = row.get(name)
    try:
        if isinstance(value, bool) or value is None:
            raise ValueError
        return float(value)
    except (TypeError, ValueError):
        fix = f"Name it with data.columns: {{{name}: <their name>}}."
        raise InputError(f"needs a number {name}, not {value!r}", where=where, fix=fix) from None


def verdict(value: Any, where: str) -> bool:
    """A label: true or false, 1 or 0, or the same as text."""
    known = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}
    found = known.get(str(value).lower())
    if found is None:
        raise InputError(
            f"label is {value!r}, neither true nor false",
            where=where,
            fix=(
                "Write true or false, or 1 or 0. If another column says it: data.columns: {label:"
                " <their name>}."
            ),
        )
    return found
