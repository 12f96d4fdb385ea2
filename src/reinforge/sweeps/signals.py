"""Signals that a sweep hears: they are for the trial that runs, and for the sweep after it."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from types import TracebackType
from typing import Any

from reinforge.core.errors import Terminated

HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
# what whoever handles or ignores them (nohup) keeps as it is
WARNINGS = (signal.SIGHUP, signal.SIGUSR1)


def _tell(text: str) -> None:
    """Right away, whatever the main thread is in the middle of; a terminal may be gone."""
    with suppress(OSError):
        os.write(2, f"\n{text}\n".encode())


class SweepSignals:
    """Passes signals on to the process of a trial, which saves a checkpoint and ends. `run_sweep`
    makes it and looks at `received` between two trials.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None  # the first one
        self.child: int | None = None  # the process that runs
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> SweepSignals:
        if threading.current_thread() is not threading.main_thread():
            return self
        for kind in HEARD:
            if kind not in WARNINGS or signal.getsignal(kind) is signal.SIG_DFL:
                self._before[kind] = signal.signal(kind, self._hear)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for heard, handler in self._before.items():
            signal.signal(heard, handler)

    def follow(self, child: int | None) -> None:
        """The process that signals are for from now on; None: there is none."""
        self.child = child
        if child is not None and self.received is not None:
            os.kill(child, self.received)

    def _hear(self, number: int, frame: object) -> None:
        kind = signal.Signals(number)
        again = self.received is not None
        self.received = self.received or kind
        if self.child is not None:
            if not again:
                _tell(f"{kind.name}: the trial saves a checkpoint, then the sweep stops")
            with suppress(ProcessLookupError):
                os.kill(self.child, number)
        elif again:
            raise KeyboardInterrupt

    def check(self, done: int, total: int) -> None:
        """Ends the sweep if it was asked to end."""
        if self.received is None:
            return
        error = Terminated(
            f"stopped by {self.received.name} after {done} of {total} trials; the same command"
            " continues."
        )
        error.exit_code = 128 + self.received
        raise error
