"""Rows that cannot be used, told together: the first of them with their places, and how many there
are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from reinforge.core.errors import InputError

SHOWN = 5


class BadRows:
    """What is wrong with single rows. Whoever goes through rows makes one, looks at each row within
    `looking_at`, and calls `refuse` at the end.
    """

    def __init__(self) -> None:
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
        """Raises what was found: an error as it is, or several in one."""
        if not self.errors:
            return
        if len(self.errors) == 1:
            raise self.errors[0]
        lines = [f"{len(self.errors)} of {self.seen} rows cannot be used:"]
        lines += [f"  - {error.where}: {error.what}" for error in self.errors[:SHOWN]]
        more = len(self.errors) - SHOWN
        if more > 0:
            lines.append(f"  - and {more} more")
        if self.errors[0].fix:
            lines.append(self.errors[0].fix)
        raise InputError("\n".join(lines), where="data")
