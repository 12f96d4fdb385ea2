"""Rows that cannot be used, told together: the first of them with their places, and how many there
are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from reinforge.core.errors import InputError

SHOWN = 5  # reasons, and places of each


class BadRows:
    """What is wrong with single rows. Whoever goes through rows makes one, looks at each row within
    `looking_at`, and calls `refuse` at the end, or, where they are dropped, tells `lines`.
    """

    def __init__(self, *, drop: bool = False) -> None:
        self.drop = drop
        self.seen = 0
        self.errors: list[InputError] = []

    @contextmanager
    def looking_at(self, place: str) -> Iterator[None]:
        """Keeps an error of the row at this place. Others, such as a template that no row can fill,
        are raised at once.
        """
        self.seen += 1
        try:
            yield
        except InputError as error:
            if place not in (error.where or ""):
                raise
            self.errors.append(error)

    def refuse(self) -> None:
        """Raises what was found: an error as it is, or several in one. Where rows are dropped, only
        if none is left.
        """
        if not self.errors or (self.drop and len(self.errors) < self.seen):
            return
        if len(self.errors) == 1:
            raise self.errors[0]
        lines = [f"{len(self.errors)} of {self.seen} rows cannot be used:", *self._named()]
        left_out = "Or leave such rows out: data.bad_rows: drop."
        hints = [self.errors[0].fix, left_out if len(self.errors) < self.seen else None]
        if any(hints):
            lines.append(" ".join(hint for hint in hints if hint))
        raise InputError("\n".join(lines), where="data")

    def lines(self) -> list[str]:
        """What was dropped, and why."""
        if not self.errors:
            return []
        first = f"{len(self.errors)} of {self.seen} rows dropped (data.bad_rows: drop):"
        return ["\n".join([first, *self._named()])]

    def _named(self) -> list[str]:
        found = [(error.where or "", error.what) for error in self.errors]
        return [f"  - {line}" for line in by_reason(found)]


def by_reason(found: Sequence[tuple[str, str]]) -> list[str]:
    """Places and what is wrong there, in their order: a line for each reason, with the first places
    that have it.

    >>> by_reason([("a:1", "is empty"), ("a:2", "is no text"), ("a:4", "is empty")])
    ['a:1: is empty (also a:4)', 'a:2: is no text']
    >>> by_reason([(f"a:{i}", "is empty") for i in range(50)])
    ['a:0: is empty (also a:1, a:2, a:3, a:4 and 45 more)']
    """
    places: dict[str, list[str]] = {}
    for where, what in found:
        places.setdefault(what, []).append(where)
    lines = [_line(what, wheres) for what, wheres in list(places.items())[:SHOWN]]
    more = sum(len(wheres) for wheres in list(places.values())[SHOWN:])
    return [*lines, f"and {more:,} more"] if more else lines


def _line(what: str, wheres: Sequence[str]) -> str:
    first, *others = wheres[:SHOWN]
    more = len(wheres) - SHOWN
    rest = f" and {more:,} more" if more > 0 else ""
    also = f" (also {', '.join(others)}{rest})" if others else ""
    return f"{first}: {what}{also}"
