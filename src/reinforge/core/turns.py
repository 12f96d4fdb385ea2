"""Turns on a GPU that two threads use: one trains, one generates.

While a CUDA graph is captured nobody else may wait for the device or give its memory back, and the
operations that go into the graph must not be those that torch chooses for somebody else.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _OfThread(threading.local):
    inside = False  # whether this thread works


class Turns:
    """Any number of threads work at the same time, or one is alone. Who wants to be alone goes
    before everybody who begins to work after that; who waited meanwhile goes next, so that nobody
    waits for ever. It is about threads: kernels that were launched before may still run.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._working = 0
        self._waiting = 0  # who wants to work
        self._next = 0  # of these, who goes before the next one that is alone
        self._asking = 0  # who is alone, or waits for it
        self._alone = False
        self._own = _OfThread()

    @contextmanager
    def working(self) -> Iterator[None]:
        """A piece of work that is not interrupted."""
        if self._own.inside:
            yield
            return
        self._begin()
        try:
            yield
        finally:
            self._end()

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Inside a piece of work: it waits for something elsewhere, and others may be alone."""
        if not self._own.inside:
            yield
            return
        self._end()
        try:
            yield
        finally:
            self._begin()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, nobody works."""
        assert not self._own.inside, "it would wait for itself"
        with self._changed:
            self._asking += 1
            try:
                self._changed.wait_for(self._nobody)
            except BaseException:
                self._asking -= 1
                self._changed.notify_all()
                raise
            self._alone = True
        try:
            yield
        finally:
            with self._changed:
                self._alone = False
                self._asking -= 1
                self._next = self._waiting
                self._changed.notify_all()

    def _nobody(self) -> bool:
        return not (self._working or self._alone or self._next)

    def _may_work(self) -> bool:
        return not self._alone and (self._next > 0 or not self._asking)

    def _begin(self) -> None:
        with self._changed:
            self._waiting += 1
            try:
                self._changed.wait_for(self._may_work)
                self._working += 1
            finally:
                self._waiting -= 1
                self._next = max(self._next - 1, 0)
                self._changed.notify_all()
        self._own.inside = True

    def _end(self) -> None:
        self._own.inside = False
        with self._changed:
            self._working -= 1
            self._changed.notify_all()


TURNS = Turns()  # of this process
