"""Where the seconds of a step go."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Phases:
    """`with phases("generate"):` adds up seconds by phase. A phase inside another takes its time away from the outer one,
    so that phases never count a second twice. Work that a GPU does later belongs to the phase that waits for it."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.clock = clock
        self._seconds: dict[str, float] = {}
        self._stack: list[str] = []
        self._since = self._start = clock()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._settle()
        self._stack.append(name)
        try:
            yield
        finally:
            self._settle()
            self._stack.pop()

    def _settle(self) -> None:
        """Books the time since the last change on the innermost open phase."""
        now = self.clock()
        if self._stack:
            self._seconds[self._stack[-1]] = self._seconds.get(self._stack[-1], 0.0) + now - self._since
        self._since = now

    def take(self) -> dict[str, float]:
        """`time/<phase>` in seconds and `share/<phase>` of the time since the last take; what no phase covered is `other`."""
        self._settle()
        total = self._since - self._start
        seconds = self._seconds | {"other": max(total - sum(self._seconds.values()), 0.0)}
        self._seconds, self._start = {}, self._since
        times = {f"time/{name}": value for name, value in seconds.items()}
        return times | {f"share/{name}": value / total if total > 0 else 0.0 for name, value in seconds.items()}
