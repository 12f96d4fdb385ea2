"""Processes that judge, one for each thread of a pool: what it takes to start, feed and watch a run
is then not done by the process that trains, whose interpreter has better things to do. Each has a
launcher that is up already (zygote.py).

They are ours and outside of any containment, and speak pickle over a private socket. One that dies
costs the call it had; one whose call was cancelled is killed, and its run with it: the launcher's
pipe closes.
"""

from __future__ import annotations

import json
import pickle
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from reinforge.core.frames import frame, read_frame
from reinforge.sandbox import zygote
from reinforge.sandbox.isolation import Isolation
from reinforge.sandbox.process import Process
from reinforge.sandbox.program import Limits, interpreter

LOOK = 0.25  # seconds between looks at whether a call was cancelled
BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); from reinforge.sandbox.workers import"
    " serve; serve(int(sys.argv[1]))"
)


class JudgeWorker:
    """Used by one thread at a time."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._popen = subprocess.Popen(
            [sys.executable, "-c", BOOT, str(theirs.fileno()), json.dumps(sys.path)],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()

    def call(
        self,
        function: Callable[..., Any],
        isolation: Isolation,
        cancel: threading.Event,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """`function(isolation, cancel, ...)`, done over there.

        Raises what it raises, and OSError if the worker died or was cancelled.
        """
        self._socket.sendall(frame(pickle.dumps((function, isolation, args, kwargs))))
        answer = select.poll()  # not select: this process may have more than 1024 descriptors
        answer.register(self._socket, select.POLLIN)
        while not answer.poll(LOOK * 1000):
            if cancel.is_set():
                self.close(kill=True)
                raise OSError("cancelled")
        done, value = pickle.loads(read_frame(self._socket))
        if not done:
            raise value
        return value

    def close(self, kill: bool = False) -> None:
        self._socket.close()
        if kill:
            self._popen.kill()
        try:
            self._popen.wait(10)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()

    @property
    def alive(self) -> bool:
        return self._socket.fileno() >= 0 and self._popen.poll() is None


class JudgeWorkers:
    """A worker for every thread that asks."""

    def __init__(self) -> None:
        self._own = threading.local()
        self._all: list[JudgeWorker] = []

    def call(
        self,
        function: Callable[..., Any],
        isolation: Isolation,
        cancel: threading.Event,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        worker: JudgeWorker | None = getattr(self._own, "worker", None)
        if worker is None or not worker.alive:
            if worker is not None:
                worker.close(kill=True)
                self._all.remove(worker)
            worker = self._own.worker = JudgeWorker()
            self._all.append(worker)
        try:
            return worker.call(function, isolation, cancel, args, kwargs)
        except EOFError:
            raise OSError("the process that judges died") from None

    def close(self) -> None:
        """When no thread asks any more."""
        while self._all:
            self._all.pop().close()


def serve(fd: int) -> None:
    """A worker: one call after the other, until nobody is there to ask."""
    channel = socket.socket(fileno=fd)
    zygote.enable()
    tried = False
    while True:
        try:
            function, isolation, args, kwargs = pickle.loads(read_frame(channel))
        except EOFError:
            return
        if not tried and isolation.mode == "own":
            tried = True
            _try(isolation)
        try:
            reply = (True, function(isolation, None, *args, **kwargs))
        except Exception as error:
            reply = (False, error)
        channel.sendall(frame(pickle.dumps(reply)))


def _try(isolation: Isolation) -> None:
    """One run, before any that counts: where a root that is made beforehand does not work, each run
    makes its own.
    """
    with Process(
        isolation, [interpreter(), "-I", "-S", "-B", "-c", "print(1+1)"], {}, Limits(seconds=20)
    ) as process:
        result = process.finish()
    if result.stdout != b"2\n":
        zygote.share_nothing()
