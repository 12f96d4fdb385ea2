"""A server of somebody else's as our child: its own process group, a log file, ready or a readable
error, and gone when we are.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from reinforge.core.errors import InputError


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerProcess:
    """A server in a process of its own, started on construction and ended with this one. A
    `Replica` makes it.

    `log` is appended to, so that what a server said before it was started again is still there.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, *, where: str
    ):
        self.command = list(command)
        self.log = log
        self.where = where
        log.parent.mkdir(parents=True, exist_ok=True)
        self._start = log.stat().st_size if log.exists() else 0
        # a server may write its key into it
        with open(log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as out:
            try:
                self.child = subprocess.Popen(
                    self.command,
                    env=dict(environment),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )
            except OSError as error:
                raise InputError(
                    f"cannot start {self.command[0]}: {error.strerror}",
                    where=where,
                    fix="Give the path of a Python that has the engine.",
                ) from error
        # also when nobody holds it any more
        self._end = weakref.finalize(self, _end, self.child, leash(self.child.pid), os.getpid())

    @property
    def pid(self) -> int:
        return self.child.pid

    @property
    def alive(self) -> bool:
        return self.child.poll() is None

    async def ready(self, answers: Callable[[], Awaitable[bool]], seconds: float) -> None:
        """Waits until `answers` says so.

        A server that ends, or is not there in time, is an error with the end of its log.
        """
        limit = time.monotonic() + seconds
        while True:
            if not self.alive:
                raise InputError(
                    f"the server ended with status {self.child.returncode} before it was ready. The"
                    f" end of {self.log}:\n{self.tail()}",
                    where=self.where,
                    fix="See what the log says; engine.args and engine.env are passed on to it.",
                )
            if await answers():
                return
            if time.monotonic() > limit:
                self.stop()
                raise InputError(
                    f"the server was not ready after {seconds:.0f} s. The end of"
                    f" {self.log}:\n{self.tail()}",
                    where=self.where,
                    fix="Raise engine.start_seconds, or see what the log says.",
                )
            await asyncio.sleep(0.2)

    def tail(self, lines: int = 25) -> str:
        """The end of what this process said, errors first where there are any."""
        with self.log.open("rb") as file:
            file.seek(self._start)
            text = file.read().decode(errors="replace").splitlines()
        errors = [i for i, line in enumerate(text) if "Error" in line]
        end = errors[-1] + 1 if errors else len(text)
        return "\n".join(line[:300] for line in text[max(0, end - lines) : end])

    def stop(self) -> None:
        self._end()


def leash(group: int) -> subprocess.Popen[bytes]:
    """Ends a process group when this process ends, however it does: a shell that waits for the end
    of a pipe that only we hold. It is nobody's child, because who kills us may kill all our
    children with us (Ray does), and the server's own would be left.
    """
    waits = 'exec 3<&0; (read _ <&3; kill -s KILL -- "-$1") </dev/null &'
    return subprocess.Popen(
        ["/bin/sh", "-c", waits, "leash", str(group)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _end(child: subprocess.Popen[bytes], leash: subprocess.Popen[bytes], owner: int) -> None:
    """Ends the whole group at once: servers of models hold nothing that wants saving.

    A fork of ours that ends leaves it alone.
    """
    if os.getpid() != owner:
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        child.wait(timeout=10)
        leash.communicate(timeout=10)
