"""One contained run, seen from outside: starts it, moves bytes in and out under their caps, kills
it in time, leaves nothing behind.

Everything here happens in one thread, in `_pump`: it consumes what the pipes hold, writes what they
take, and returns when its caller has what it waits for or the run is over. Limits are looked at
after every piece.
"""

from __future__ import annotations

import json
import marshal
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from reinforge.sandbox import zygote
from reinforge.sandbox.isolation import Isolation, arguments, job_of
from reinforge.sandbox.program import WORK, Limits, Result, Status

# from our start of the launcher to the program's; longer is our fault, not the program's
SETUP_SECONDS = 60.0
GIVE_UP_SECONDS = 5.0  # after a kill
PIECE = 1 << 16


class Process:
    """Use as a context manager.

    `channel` gives the program descriptors 3 (to read) and 4 (to write), see `ask`.
    """

    def __init__(
        self,
        isolation: Isolation,
        argv: Sequence[str],
        files: Mapping[str, bytes],
        limits: Limits,
        stdin: bytes = b"",
        *,
        channel: bool = False,
        node: bool = False,
        cancel: threading.Event | None = None,
        driver: str | None = None,
    ) -> None:
        self.limits = limits
        self.isolation = isolation
        self._cancel = cancel
        self._status: Status | None = None
        self._reason = ""
        self._lines: list[str] = []
        self._out: dict[str, bytearray] = {
            "stdout": bytearray(),
            "stderr": bytearray(),
            "report": bytearray(),
            "info": bytearray(),
            "replies": bytearray(),
        }
        self._in: dict[str, bytearray] = {}
        self._fds: dict[str, int] = {}
        self._pidfd: int | None = None
        self._forks: zygote.Zygote | None = None
        self._struck = False
        self.greedy = False  # whether it took, or wanted, more than one core for a while
        self._started = self._ended = 0.0
        self._born = time.monotonic()
        self._give_up = float("inf")
        self._folder = tempfile.mkdtemp(prefix="reinforge-unsafe-") if isolation.unsafe else None
        work = os.path.realpath(self._folder) if self._folder else WORK
        told = job_of(isolation, argv, dict(files), limits, work, node, driver)
        job = marshal.dumps(told)
        self._selector = selectors.DefaultSelector()
        self._launch(channel, told["limits"])
        self._send("control", len(job).to_bytes(8, "little") + job)
        self._send("stdin", stdin)
        if not stdin:
            self._close("stdin")

    def _launch(self, channel: bool, limits: dict[str, int | None]) -> None:
        ours: dict[str, int] = {}
        theirs: dict[str, int] = {}
        names_out = [
            "stdout",
            "stderr",
            "report",
            *(["info"] if self.isolation.mode == "bwrap" else []),
            *(["replies"] if channel else []),
        ]
        names_in = ["control", "stdin", *(["requests"] if channel else [])]
        try:
            for name in names_out:
                ours[name], theirs[name] = os.pipe()
            for name in names_in:
                theirs[name], ours[name] = os.pipe()
            handed = [
                theirs[name]
                for name in ("control", "report", "requests", "replies")
                if name in theirs
            ]
            box = self._box()
            if box is not None:
                try:
                    box.start(
                        [theirs[name] for name in ("stdin", "stdout", "stderr")] + handed, limits
                    )
                    self._pidfd = os.dup(box.first)
                except OSError:  # it died just now
                    box.close()
                    raise
            self._popen: subprocess.Popen[bytes] | zygote.WarmLauncher = box or subprocess.Popen(
                arguments(self.isolation, self.limits, theirs.get("info", -1), handed),
                stdin=theirs["stdin"],
                stdout=theirs["stdout"],
                stderr=theirs["stderr"],
                env={},
                cwd="/",
                pass_fds=[fd for name, fd in theirs.items() if not name.startswith("std")],
                start_new_session=True,
            )
        except OSError:
            for fd in ours.values():
                os.close(fd)
            self._selector.close()
            raise
        finally:
            for fd in theirs.values():
                os.close(fd)
        self._fds = ours
        for name, fd in ours.items():
            os.set_blocking(fd, False)
            if name in names_out:
                self._selector.register(fd, selectors.EVENT_READ, name)

    def _box(self) -> zygote.WarmLauncher | None:
        """Where this run takes place, if there are boxes here.

        What they lack to be made, a launcher of its own says better.
        """
        if self.isolation.mode != "own" or self.limits.packages:
            return None
        self._forks = zygote.ready()
        try:
            return self._forks.take() if self._forks is not None else None
        except OSError:
            self._forks = None
            return None

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- bytes

    def _send(self, name: str, data: bytes) -> None:
        """Queue bytes for a pipe of the program; a pipe that nobody reads any more
        swallows them.
        """
        if name in self._fds and data:
            if not self._in.get(name):
                self._selector.register(self._fds[name], selectors.EVENT_WRITE, name)
            self._in.setdefault(name, bytearray()).extend(data)

    def _close(self, name: str) -> None:
        fd = self._fds.pop(name, None)
        if fd is not None:
            if fd in self._selector.get_map():
                self._selector.unregister(fd)
            os.close(fd)
        self._in.pop(name, None)

    def _write(self, name: str) -> None:
        data = self._in[name]
        try:
            del data[: os.write(self._fds[name], data[:PIECE])]
        except BlockingIOError:
            return
        except OSError:  # nobody reads: the other end is gone
            self._close(name)
            return
        if not data:
            self._selector.unregister(self._fds[name])
            if name == "stdin":
                self._close(name)

    def _read(self, name: str) -> None:
        try:
            data = os.read(self._fds[name], PIECE)
        except BlockingIOError:
            return
        if not data:
            self._close(name)
            return
        held = self._out[name]
        held += data
        if name in ("report", "info"):
            self._heard(name)
        elif len(held) > self.limits.output_kb * 1024:
            del held[self.limits.output_kb * 1024 :]
            self._kill("output", f"more than {self.limits.output_kb} kB on {name}")

    def _heard(self, name: str) -> None:
        """The launcher, or bubblewrap, said something: both are ours and outside the program's
        reach.
        """
        held = self._out[name]
        if name == "info":
            if b"}" in held:
                self._go(json.loads(held)["child-pid"])
            return
        while b"\n" in held:
            line, _, rest = held.partition(b"\n")
            held[:] = rest
            word, _, rest_of_line = line.decode("utf-8", "replace").partition(" ")
            if word == "pid":
                self._go(int(rest_of_line))
            elif word == "started":
                self._started = time.monotonic()
            elif word == "over":
                self._kill(*self._over_what(rest_of_line))
            elif word == "greedy":
                self.greedy = True
            elif word == "error":
                self._kill("refused", rest_of_line)
            elif word == "clean" and isinstance(self._popen, zygote.WarmLauncher):
                self._popen.idle = not self._struck
            else:
                self._ended = time.monotonic()
                self._lines.append(line.decode())
                if self.isolation.unsafe:
                    self._strike()  # nothing else ends what it left behind

    def _over_what(self, name: str) -> tuple[Status, str]:
        """What a run is killed as, and the reason, when all its processes together have
        too much.
        """
        if name == "cpu":
            return "timeout", "processor time of all its processes"
        if name == "descriptors":
            return "memory", f"more than {self.limits.descriptors_in_all} open files in all"
        return "memory", f"more than {self.limits.memory_mb} MB in all"

    def _go(self, pid: int) -> None:
        """Process 1 of the run waits for this; from here on we hold a handle that can never mean
        another process.
        """
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:  # it failed meanwhile: the report says at what
            return
        self._send("control", b"g")

    # -- time

    def _deadline(self) -> float:
        return self._started + self.limits.seconds if self._started else self._born + SETUP_SECONDS

    def _kill(self, status: Status, reason: str = "") -> None:
        """End every process of the run, from outside. The first reason stays."""
        if self._status is None:
            self._status, self._reason, self._ended = (
                status,
                reason,
                self._ended or time.monotonic(),
            )
        self._strike()

    def _strike(self) -> None:
        self._struck = True
        if isinstance(self._popen, zygote.WarmLauncher):
            self._popen.idle = False
        self._give_up = min(self._give_up, time.monotonic() + GIVE_UP_SECONDS)
        if self._pidfd is None:
            self._popen.kill()
            return
        try:
            if self.isolation.unsafe:
                os.killpg(self._popen.pid, signal.SIGKILL)
            else:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def _pump(self, done: Callable[[], bool], deadline: float | None = None) -> None:
        """Move bytes until `done`, or until every pipe out of the run is closed, which is when its
        last process is gone.
        """
        while not done() and any(name in self._fds for name in self._out):
            now = time.monotonic()
            # killed, but a pipe is still held: without containment a detached process can do that
            if now > self._give_up:
                return
            until = min(self._deadline(), deadline or float("inf"))
            if self._status is None and now >= until:
                self._kill(
                    "timeout" if self._started else "refused",
                    "" if self._started else "the sandbox was not up in time",
                )
            if self._status is None and self._cancel is not None and self._cancel.is_set():
                self._kill("refused", "cancelled")
            for key, _ in self._selector.select(
                min(max(until - now, 0.0), 0.25) if self._status is None else 0.25
            ):
                if key.data in self._fds:
                    (self._read if key.data in self._out else self._write)(key.data)

    def ask(self, request: bytes, seconds: float) -> bytes | None:
        """One line to the program's descriptor 3, one line back from 4; None if none came: it is
        over, see `finish`.
        """
        assert b"\n" not in request
        if self._over or self._out["replies"]:  # something was said before it was asked
            self._kill("crashed", "wrote to the channel unasked")
            return None
        self._send("requests", request + b"\n")
        if not self._started:
            self._pump(lambda: bool(self._started))
        self._pump(lambda: b"\n" in self._out["replies"] or self._over, time.monotonic() + seconds)
        line, found, rest = self._out["replies"].partition(b"\n")
        self._out["replies"] = rest
        return bytes(line) if found and self._status is None else None

    @property
    def _over(self) -> bool:
        return self._status is not None or bool(self._lines)

    def finish(self, kill: bool = False) -> Result:
        """Wait for the end of the run (or bring it about) and say how it ended."""
        self._close("requests")
        if kill and not self._over:
            self._kill("ok", "no longer needed")
        self._pump(lambda: False)
        result = self._result()
        self.close()
        return result

    def _result(self) -> Result:
        code: int | None = None
        number: int | None = None
        cpu = memory = 0.0
        if self._lines:
            status, cpu_text, rss = self._lines[0].split()[1:]
            code = os.waitstatus_to_exitcode(int(status))
            code, number = (None, -code) if code < 0 else (code, None)
            cpu = float(cpu_text)
            memory = int(rss) / 1024
        how = self._status
        reason = self._reason
        if how is None:
            how, reason = self._judged(code, number)
        seconds = max(self._ended - self._started, 0.0) if self._started else 0.0
        stdout = bytes(self._out["stdout"])
        stderr = bytes(self._out["stderr"])
        return Result(
            how,
            code,
            number,
            stdout,
            stderr,
            seconds,
            cpu,
            memory,
            reason,
            self.isolation.unsafe,
            self.greedy,
        )

    def _judged(self, code: int | None, number: int | None) -> tuple[Status, str]:
        if number in (signal.SIGXCPU,):
            return "timeout", "processor time"
        if number == signal.SIGXFSZ:
            return "output", "a file was too large"
        if number == signal.SIGKILL:
            return "killed", "killed from inside"
        if number is not None:
            return "crashed", (
                signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
            )
        if code is None:
            if not self._started:
                said = bytes(self._out["stderr"]).decode("utf-8", "replace").strip().splitlines()
                return "refused", said[-1][:300] if said else "the sandbox did not start"
            return "killed", "the sandbox vanished"
        if code != 0 and b"MemoryError" in self._out["stderr"][-200:]:
            return "memory", "address space"
        return ("ok", "") if code == 0 else ("crashed", f"exit code {code}")

    def close(self) -> None:
        """Kill what is left, reap it, close every descriptor, remove every file.

        May be called twice.
        """
        # a box kills what is left by itself, and says when
        if self._forks is not None and not self._over:
            self._close("control")
            self._status, self._ended = "killed", self._ended or time.monotonic()
            self._give_up = time.monotonic() + GIVE_UP_SECONDS
            self._pump(lambda: self._popen.poll() is not None)
        if self._popen.poll() is None:
            if any(name in self._fds for name in self._out):
                self._kill("killed")
            try:
                self._popen.wait(10)
            except subprocess.TimeoutExpired:
                self._popen.kill()
                self._popen.wait()
        if self.isolation.unsafe:
            try:
                os.killpg(self._popen.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        for name in list(self._fds):
            self._close(name)
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        self._selector.close()
        if self._forks is not None:
            assert isinstance(self._popen, zygote.WarmLauncher)
            self._forks.give(self._popen)
            self._forks = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
