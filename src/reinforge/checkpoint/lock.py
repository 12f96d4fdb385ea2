"""One owner per run directory.

`run.lock` says who: pid, host, process start time, since when; a thread refreshes its modification
time. Whoever wants it reads and writes it under a short flock on `run.lock.guard`, so that two
takeovers cannot both win. The flock is not held for the life of the run, because forked children
would inherit it and keep a dead run locked.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from reinforge.core.errors import InputError

LOCK = "run.lock"
HEARTBEAT_SECONDS = 10.0
STALE_SECONDS = 120.0
GUARD_SECONDS = 10.0


def process_start(pid: int) -> str | None:
    """When the process began, in kernel ticks; None if there is no such process (or only its
    zombie). A reused pid differs.
    """
    if not Path("/proc/self/stat").exists():
        return _start_without_proc(pid)
    try:
        fields = (
            Path(f"/proc/{pid}/stat")
            .read_text(encoding="utf-8", errors="replace")
            .rpartition(")")[2]
            .split()
        )
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields[19]


def _start_without_proc(pid: int) -> str | None:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return "unknown"


def machine() -> str:
    """Where a pid means the same process: this boot of this kernel, this pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/pid")
    parts = [
        boot.read_text().strip() if boot.exists() else "",
        os.readlink(namespace) if namespace.is_symlink() else "",
    ]
    return "/".join([socket.gethostname(), *parts])


class RunLock:
    """`with RunLock(run_dir):` owns the directory or raises InputError naming the owner.

    A dead owner's lock is taken over.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        notice: Callable[[str], None] = logging.getLogger("reinforge").warning,
    ):
        self.path = Path(run_dir) / LOCK
        self.guard = Path(run_dir) / f"{LOCK}.guard"
        self.notice = notice
        # the record of the dead owner, if there was one
        self.took_over: dict[str, Any] | None = None
        self._nonce = secrets.token_hex(8)
        self._stop = threading.Event()
        self._lost = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> RunLock:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._guarded():
            if self.path.exists():
                record = self._read()
                self._refuse_if_alive(record)
                self.took_over = record
                self.path.unlink()
            self._create()
        if self.took_over is not None:
            self.notice(
                f"{self.path}: took over the lock of pid {self.took_over.get('pid')} on"
                f" {self.took_over.get('host')}, which is gone"
            )
        self._thread = threading.Thread(target=self._beat, name="run-lock", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if os.getpid() != self._pid:  # a forked child must not release its parent's lock
            return
        self._stop.set()
        if self._thread:
            self._thread.join()
        if not self.path.parent.is_dir():  # moved or deleted, and the lock with it
            return
        with self._guarded():
            if self.path.exists() and self._read().get("nonce") == self._nonce:
                self.path.unlink()

    def check(self) -> None:
        """Raises if another process has taken the directory over, e.g. while this one was
        suspended. Call before a save.
        """
        self.check_place()
        if self._lost or self._read().get("nonce") != self._nonce:
            raise InputError(
                "this process no longer owns the run directory: another one took it over.",
                where=str(self.path.parent),
                fix="Let the other run go on, or stop it and start this one again.",
            )

    def check_place(self) -> None:
        """Raises if the directory is not where it was."""
        if not self.path.parent.is_dir():
            raise InputError(
                "the run's directory is gone: it was moved or deleted while the run went on.",
                where=str(self.path.parent),
                fix=(
                    "Move it back and give the same command again: the run goes on from its last"
                    " checkpoint."
                ),
            )

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        handle = os.open(self.guard, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + GUARD_SECONDS
        try:
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise InputError(
                            "another process is holding the guard of the run's lock.",
                            where=str(self.guard),
                            fix="Look for a stopped reinforge process on this machine.",
                        ) from None
                    time.sleep(0.02)
            yield
        finally:
            os.close(handle)

    def _create(self) -> None:
        self._pid = os.getpid()
        record = {
            "pid": self._pid,
            "host": socket.gethostname(),
            "machine": machine(),
            "start": process_start(self._pid),
            "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "nonce": self._nonce,
        }
        try:
            handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            # only where flock does nothing (some network file systems) and another process was
            # faster
            self._refuse(self._read())
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(record, file)
            file.flush()
            os.fsync(file.fileno())

    def _read(self) -> dict[str, Any]:
        """The owner's record; empty if it died between creating the file and writing it, or if the
        file is gone.
        """
        try:
            value = json.loads(self.path.read_bytes())
        except (ValueError, FileNotFoundError):
            return {}
        return value if isinstance(value, dict) else {}

    def _refuse_if_alive(self, record: dict[str, Any]) -> None:
        if record.get("machine") == machine():
            if (
                record.get("start") is not None
                and process_start(int(record["pid"])) == record["start"]
            ):
                self._refuse(record)
        elif record and self._age() < STALE_SECONDS:
            self._refuse(record)

    def _refuse(self, record: dict[str, Any]) -> NoReturn:
        who = f"pid {record.get('pid')} on {record.get('host')} since {record.get('since')}"
        elsewhere = (
            ""
            if record.get("machine") == machine()
            else (
                f" If that machine is gone, wait {STALE_SECONDS:.0f} s after its last sign of life."
            )
        )
        raise InputError(
            f"another run owns this directory: {who}.",
            where=str(self.path.parent),
            fix=f"Wait for it, stop it, or choose another run.dir.{elsewhere}",
        )

    def _age(self) -> float:
        """Seconds since the last heartbeat by the file system's own clock, so that clocks of two
        hosts are never compared.
        """
        os.utime(self.guard)
        return self.guard.stat().st_mtime - self.path.stat().st_mtime

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            try:
                self._lost = self._read().get("nonce") != self._nonce
                if self._lost:
                    return
                os.utime(self.path)
            except OSError as error:  # a network file system may stumble; the next beat tries again
                self.notice(f"{self.path}: no heartbeat ({error})")
