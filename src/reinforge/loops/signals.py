"""Signals that end a run: SIGTERM and Ctrl-C, a terminal that closes, a batch system's warning.

The first one asks for a checkpoint and an end at the next step boundary; work that may be cut
(`cancellable`) is cancelled. A second one ends the process at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from reinforge.core.errors import Terminated

T = TypeVar("T")
# a terminal that closes, a batch system whose time runs out: the end comes later
WARNINGS = (signal.SIGHUP, signal.SIGUSR1)
# in the environment of a process whose parent passes its own signals on to it
PASSED_ON = "REINFORGE_TRIAL"
PASSING_PARENTS = ("TORCHELASTIC_RUN_ID", PASSED_ON)


def _kinds() -> list[signal.Signals]:
    """The signals that end a run with a checkpoint.

    Whoever ignores or handles a warning (nohup ignores SIGHUP) keeps it so.
    """
    free = [kind for kind in WARNINGS if signal.getsignal(kind) is signal.SIG_DFL]
    return [signal.SIGTERM, signal.SIGINT, *free]


def _has_passing_parent() -> bool:
    return any(name in os.environ for name in PASSING_PARENTS)


class Signals:
    """The request that a run should end, by a signal or from any thread.

    The run makes it, listens while it is open, and looks at `received` at its boundaries.
    `tell` gets what the person who watches should hear; `hung_up` is called in the signal handler
    when the terminal has closed.
    """

    def __init__(self, tell: Callable[[str], None], hung_up: Callable[[], None]):
        self.tell = tell
        self.hung_up = hung_up
        self.received: signal.Signals | None = None  # the signal that asked the run to end
        self._handlers: dict[signal.Signals, Any] = {}  # what was there before ours
        self._task: asyncio.Future[Any] | None = None  # the work to cancel
        self._loop: asyncio.AbstractEventLoop | None = None  # that of the run, while it listens

    def listen(self) -> None:
        """From now on; called in the event loop that runs the run."""
        self._loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            self._handlers = {kind: signal.signal(kind, self.handle) for kind in _kinds()}

    def close(self) -> None:
        """The handlers of before are back."""
        self._loop = None
        for kind, handler in self._handlers.items():
            signal.signal(kind, handler)

    def handle(self, number: int, frame: object) -> None:
        """Runs between two instructions of whatever the main thread does, so a long step cannot
        hide a signal, and a second one ends the process at once. It may be in the middle of
        anything, so what is to be done is left to the event loop.
        """
        kind = signal.Signals(number)
        if kind is signal.SIGHUP:
            self.hung_up()
        if self.received:
            if kind in WARNINGS:
                return  # more than one process may pass the same one on
            if self.received in WARNINGS:
                # the first was a warning, this is the request: it gets its time too
                self.received = kind
                return
            if number == self.received == signal.SIGTERM and _has_passing_parent():
                # the same one: a batch system sends it to every process, and torchrun and a sweep
                # pass their own on
                return
            os._exit(128 + number)
        self.terminate(kind)

    def terminate(self, kind: signal.Signals) -> None:
        """Asks the run to end, as a signal does. May be called from any thread, and twice."""
        if self.received:
            return
        self.received = kind
        loop = self._loop
        if loop is not None:
            loop.call_soon_threadsafe(self._cancel)
            # a step may hold the loop for a minute: whoever asked is told at once
            threading.Thread(target=self._announce, args=(kind,), daemon=True).start()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _announce(self, kind: signal.Signals) -> None:
        again = "" if kind in WARNINGS else " (once more to stop at once)"
        self.tell(f"{kind.name}: saving a checkpoint after this step, then stopping{again}")

    async def cancellable(self, work: Awaitable[T]) -> T:
        """Awaits `work`; a request to end cancels it."""
        self._task = asyncio.ensure_future(work)
        if self.received:
            self._task.cancel()
        try:
            return await self._task
        finally:
            self._task = None

    def terminated(self, step: int, total: int) -> Terminated:
        """The error that a run ends with, once a signal was received."""
        assert self.received is not None
        error = Terminated(
            f"stopped by {self.received.name} at step {step} of {total}; the same command"
            " continues."
        )
        error.exit_code = 128 + self.received
        return error

    def nothing_saved(self, error: Terminated, step: int, total: int) -> None:
        """The run that ends with `error` has no checkpoint."""
        assert self.received is not None
        error.args = (
            f"stopped by {self.received.name} at step {step} of {total}; there is no checkpoint,"
            " so the same command begins again.",
        )
