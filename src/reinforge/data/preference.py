"""Numbers and verdicts that rows bring along. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from reinforge.core.errors import InputError


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


def grade(row: Mapping[str, Any], name: str, where: str) -> float | None:
    """A column that may have a number: None where it has none, as tables and CSV files say it."""
    value = row.get(name)
    if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
        return None
    found = number(row, name, where)
    if not math.isfinite(found):
        raise InputError(f"{name} is {value!r}, which is no grade", where=where, fix="Repair it.")
    return found


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
