"""A launcher that is up already, and the boxes that it forks (forks.py): a run costs no start of an
interpreter and no namespaces.

It is a process of its own, between the one that judges and what it contains: it knows neither tests
nor expected values, so a fork of it has nothing to give away. Only for our own namespaces;
bubblewrap is a program that has to be started.
"""

from __future__ import annotations

import json
import marshal
import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reinforge.sandbox.isolation import TEXTS, layout, root_of
from reinforge.sandbox.program import interpreter

FORKS = Path(__file__).with_name("forks.py")
SETUP_SECONDS = 60.0  # for a box to be there
_enabled = False
_prepares = True  # until a launcher that should have made the root beforehand could not
_running: Zygote | None = None
_lock = threading.Lock()


class ForkedProcess:
    """The part of `subprocess.Popen` that a run needs, for a process that somebody else has
    started.
    """

    def __init__(self, pid: int, handle: int):
        self.pid = pid
        self._handle = handle

    def poll(self) -> int | None:
        """0 when it has ended, however."""
        return 0 if self._handle < 0 or select.select([self._handle], [], [], 0)[0] else None

    def wait(self, timeout: float | None = None) -> int:
        if self._handle >= 0:
            if not select.select([self._handle], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("launcher", timeout or 0.0)
            os.close(self._handle)
            self._handle = -1
        return 0

    def kill(self) -> None:
        if self._handle >= 0:
            try:
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            except ProcessLookupError:
                pass


class WarmLauncher:
    """One run at a time. Seen by a run as the process that it waits for."""

    def __init__(self, launcher: Zygote):
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(SETUP_SECONDS)
        self.idle = False
        self.first = -1  # handle on process 1
        self._outer = launcher.fork(theirs)
        theirs.close()
        try:
            for _ in range(2):  # the two that answer do not wait for each other
                message, handles, _, _ = socket.recv_fds(self._socket, 512, 1)
                self.first = handles[0] if handles else self.first
                if message not in (b"up", b"first"):
                    raise OSError(message.decode() or "the box did not start")
        except OSError:
            self.close()
            raise
        self.idle = True

    @property
    def pid(self) -> int:
        return self._outer.pid

    def start(self, fds: Sequence[int], limits: Mapping[str, Any]) -> None:
        self.idle = False
        socket.send_fds(self._socket, [marshal.dumps(dict(limits))], list(fds))

    def poll(self) -> int | None:
        """0 when its run has ended and nothing is left of it."""
        return 0 if self.idle else self._outer.poll()

    def wait(self, timeout: float | None = None) -> int:
        return 0 if self.idle else self._outer.wait(timeout)

    def kill(self) -> None:
        if self.first >= 0:
            try:
                signal.pidfd_send_signal(self.first, signal.SIGKILL)
            except ProcessLookupError:
                pass
        else:
            self._outer.kill()

    def alive(self) -> bool:
        """Whether process 1 lives; the one outside ends after it."""
        return self.first >= 0 and not select.select([self.first], [], [], 0)[0]

    def close(self) -> None:
        self.idle = False
        self.kill()
        self._socket.close()
        self._outer.wait()
        if self.first >= 0:
            os.close(self.first)
            self.first = -1


class Zygote:
    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        self._boxes: list[WarmLauncher] = []  # idle
        job = json.dumps({"prepare": _prepares, "texts": TEXTS, **root_of(layout())})
        self._popen = subprocess.Popen(
            [interpreter(), "-I", "-B", "-X", "utf8", str(FORKS), str(theirs.fileno()), job],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={},
            cwd="/",
            start_new_session=True,
        )
        theirs.close()
        if not ours.recv(8):  # it says when it is up
            self.close()
            raise OSError("the launcher did not start")

    def fork(self, asked: socket.socket) -> ForkedProcess:
        with _lock:
            socket.send_fds(self._socket, [b"r"], [asked.fileno()])
            message, handles, _, _ = socket.recv_fds(self._socket, 32, 1)
        if not message:
            raise OSError("the launcher is gone")
        return ForkedProcess(int(message), handles[0])

    def take(self) -> WarmLauncher:
        """An idle box, or a new one."""
        while self._boxes:
            box = self._boxes.pop()
            if box.alive():
                return box
            box.close()
        return WarmLauncher(self)

    def give(self, box: WarmLauncher) -> None:
        """After a run: to be used again if nothing is left in it."""
        if box.idle and self.alive():
            self._boxes.append(box)
        else:
            box.close()

    def alive(self) -> bool:
        return self._popen.poll() is None

    def close(self) -> None:
        while self._boxes:
            self._boxes.pop().close()
        self._socket.close()
        try:
            self._popen.wait(5)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()


def enable() -> None:
    """From now on runs of this process are forked.

    For processes that do nothing but judge (workers.py).
    """
    global _enabled
    _enabled = True


def ready() -> Zygote | None:
    """The launcher of this process, started again if it died; None where runs start their own."""
    global _running
    if not _enabled:
        return None
    with _lock:
        if _running is None or not _running.alive():
            try:
                _running = Zygote()
            except OSError:
                if not _prepares:
                    raise
                _share_nothing()
        return _running


def share_nothing() -> None:
    """Runs make their whole root by themselves from now on: what is made beforehand does not work
    here.
    """
    with _lock:
        _share_nothing()


def _share_nothing() -> None:
    global _prepares, _running
    _prepares = False
    old = _running
    _running = Zygote()
    if old is not None:
        old.close()
