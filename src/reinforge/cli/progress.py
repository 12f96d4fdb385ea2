"""How far a command is that asks for many answers: a bar at a terminal, elsewhere now and then a
line.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

EVERY = 30.0  # seconds between lines
Progress = Callable[[str, int, int], None]  # what, how many are done, how many there are


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A function that shows how far something is, until the block ends."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Bar(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        shown: dict[str, Any] = {}

        def tell(what: str, done: int, total: int) -> None:
            if what not in shown:
                shown[what] = bar.add_task(what, total=total)
            bar.update(shown[what], completed=done)

        yield tell


def _lines() -> Progress:
    told = time.monotonic()

    def tell(what: str, done: int, total: int) -> None:
        nonlocal told
        if time.monotonic() - told > EVERY:
            told = time.monotonic()
            print(f"{what}: {done:,} of {total:,}", file=sys.stderr, flush=True)

    return tell
