"""An environment in another interpreter: for libraries whose pins clash with ours, and for those
that crash, hang or share global state.

    env: {name: "gem:game:GuessTheNumber-v0-easy", python: envs/gem/bin/python}

One process per environment of the config imports the library once (`bridge_child.py`) and forks a
worker for each episode. Worker and episode speak JSON lines over a socket of their own, so that
what a library prints is no answer. A worker that is late, or whose episode is over, is killed; one
that dies fails its episode only.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from reinforge.core.env import Action, Observation, Step
from reinforge.core.errors import InputError
from reinforge.core.row import Row

LINE = 64 << 20  # bytes of one answer
GRACE = 2.0  # seconds for an environment to close itself
PACKAGE = Path(__file__).resolve().parents[2]  # of reinforge


@dataclass
class EnvBridge:
    """Makes environments: call it for one.

    `target` is `module:Class` or `file.py:Class`; `given` its positional arguments.
    """

    python: str
    target: str
    given: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    where: str = "env"

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self.python = os.path.expanduser(self.python)
        if not os.access(self.python, os.X_OK):
            raise InputError(
                f"{self.python} is no program that can be run.",
                where=f"{self.where}.python",
                fix="Give the path of a Python interpreter.",
            )

    def __call__(self, **_: Any) -> BridgedEnv:
        return BridgedEnv(self)

    def worker(self) -> socket.socket:
        """A socket to a fresh worker. Blocks while the library is imported for the first time."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            assert self._control is not None
            ours, theirs = socket.socketpair()
            with theirs:
                socket.send_fds(self._control, [b"w"], [theirs.fileno()])
            return ours

    def stop(self) -> None:
        """The end of everything that was started: workers die with the process that forked them."""
        with self._lock:
            if self._control is not None:
                self._control.close()
            if self._process is not None:
                try:
                    # it ends by itself, and takes a server with it that it may have started
                    self._process.wait(GRACE)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    self._process.wait()
            self._process = self._control = None

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        spec = {
            "package": str(PACKAGE),
            "target": self.target,
            "given": list(self.given),
            "options": dict(self.options),
        }
        child = Path(__file__).with_name("bridge_child.py")
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        with theirs:
            self._process = subprocess.Popen(
                [self.python, str(child), str(theirs.fileno()), json.dumps(spec)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=environment,
            )
        said = b""
        while not said.endswith(b"\n"):
            part = self._control.recv(65536)
            if not part:
                raise InputError(
                    f"{self.python} ended with exit code {self._process.wait()} before it had"
                    f" {self.target}.",
                    where=f"{self.where}.python",
                    fix=(
                        "What it wrote to standard error says why. It must be Python 3.11 or later."
                    ),
                )
            said += part
        if error := json.loads(said).get("error"):
            raise InputError(
                f"{self.target} in {self.python}: {error}",
                where=self.where,
                fix="Install what is missing there, or correct the options.",
            )


class BridgedEnv:
    """One episode in a worker.

    Its answers are journalled: whether they repeat is not known here.
    """

    pure = False

    def __init__(self, bridge: EnvBridge):
        self.bridge = bridge
        self.reader: asyncio.StreamReader | None = None
        self.writer: asyncio.StreamWriter | None = None
        # `worker` is a file descriptor that means this process and no other, whatever becomes of
        # its number
        self.pid = 0
        self.worker = -1
        self.waiting = False

    async def reset(self, row: Row, seed: int) -> Observation:
        ours = await asyncio.to_thread(self.bridge.worker)
        self.reader, self.writer = await asyncio.open_connection(sock=ours, limit=LINE)
        hello = await self._line()
        self.pid = hello["pid"]
        self.worker = os.pidfd_open(self.pid)
        found = await self._ask(
            "reset",
            {
                "row": {"id": row.id, "prompt": row.prompt, "columns": dict(row.columns)},
                "seed": seed,
            },
        )
        return Observation(**found)

    async def step(self, action: Action) -> Step:
        found = await self._ask("step", {"action": asdict(action)})
        seen = found["observation"]
        observation = None if seen is None else Observation(**seen)
        return Step(
            observation, found["reward"], found["done"], found["truncated"], found["metrics"]
        )

    async def close(self) -> None:
        try:
            if self.writer is not None and not self.waiting:
                async with asyncio.timeout(GRACE):
                    await self._ask("close", {})
        except (TimeoutError, RuntimeError):
            pass  # it is killed anyway
        finally:
            if self.worker >= 0:
                try:
                    # it is there still, so that its number is its own
                    signal.pidfd_send_signal(self.worker, 0)
                    os.killpg(self.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass  # it ended by itself
                os.close(self.worker)
                self.worker = -1
            if self.writer is not None:
                self.writer.close()
                self.writer = None

    async def _ask(self, op: str, given: Mapping[str, Any]) -> dict[str, Any]:
        assert self.writer is not None
        self.waiting = True
        self.writer.write(json.dumps({"op": op, **given}, default=str).encode() + b"\n")
        answer = await self._line()
        self.waiting = False
        if error := answer.get("error"):
            raise RuntimeError(error)
        return dict(answer["result"] or {})

    async def _line(self) -> dict[str, Any]:
        assert self.reader is not None
        try:
            line = await self.reader.readline()
        except (ValueError, ConnectionError) as error:
            raise RuntimeError(f"the environment's process: {error}") from None
        if not line.endswith(b"\n"):
            raise RuntimeError("the environment's process died")
        return dict(json.loads(line))
