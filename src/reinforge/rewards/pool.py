"""Rewards in processes that can be killed: one that hangs, dies or eats memory costs its own scores
and nothing else.

A template process imports the reward once (`worker.py`) and forks workers, so that replacing one
takes milliseconds whatever the reward imports. A call goes to one worker as JSON and comes back as
JSON. After `timeout` seconds by the monotonic clock the worker and everything it started are killed
from outside; the call is unscored and counted. The event loop is never blocked: sockets are
awaited, and generation goes on meanwhile. The pool always has its full size again.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import resource
import secrets
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from reinforge.core.errors import InputError
from reinforge.core.frames import HEAD
from reinforge.rewards.outcome import LARGEST as LARGEST_SCORE
from reinforge.rewards.outcome import RewardOutcome
from reinforge.rewards.raised import RewardRaised
from reinforge.rewards.wire import NotPlainData, encode
from reinforge.rewards.worker import packed

START = 180.0  # seconds for importing the reward
LARGEST = 64 << 20  # bytes of an answer; more is nonsense
CALLS = 1000  # of one worker; then a new one takes its place, and what leaked is gone
TRIES = 3  # template processes that may die in a row before anything works
BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2])['path']; from reinforge.rewards.worker"
    " import run; run()"
)


class WorkerCrashed(Exception):
    """The worker died."""


@dataclass(frozen=True)
class PoolSpec:
    """What a pool runs and within which limits. Pools of equal specs are one pool."""

    target: str  # file.py:function or package.module:function
    kind: str | None = None  # see adapt.py
    workers: int = 2
    timeout: float = 30.0  # seconds per call
    memory_gib: float | None = 4.0  # that a worker may take, beside what importing the reward took
    fresh: bool = False  # a new worker for every call
    preload: tuple[str, ...] = ()  # modules that the template imports for all workers
    stamp: tuple[int, ...] = ()  # of the source file: an edited reward gets a new pool


@dataclass
class RewardWorker:
    """A process that computes rewards, seen from the pool that started it."""

    channel: socket.socket
    pid: int = 0
    calls: int = 0
    buffer: bytearray = field(default_factory=bytearray)

    async def send(self, message: Any) -> None:
        await asyncio.get_running_loop().sock_sendall(self.channel, packed(message))

    async def receive(self) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        while (found := self.taken()) is None:
            part = await loop.sock_recv(self.channel, 1 << 20)
            if not part:
                raise WorkerCrashed
            self.buffer += part
        return found

    def at_hand(self) -> dict[str, Any] | None:
        """An answer that has arrived, though nobody had time to look."""
        try:
            while self.taken() is None and (part := self.channel.recv(1 << 20)):
                self.buffer += part
        except OSError:  # nothing more at the moment
            pass
        return self.taken()

    def taken(self) -> dict[str, Any] | None:
        if len(self.buffer) < HEAD.size:
            return None
        (length,) = HEAD.unpack(self.buffer[: HEAD.size])
        if length > LARGEST:
            raise WorkerCrashed
        if len(self.buffer) < HEAD.size + length:
            return None
        return json.loads(self.buffer[HEAD.size : HEAD.size + length])


class RewardPool:
    """`await pool.call(name, given, count)`. Works in any event loop, one at a time."""

    def __init__(self, spec: PoolSpec):
        self.spec = spec
        self.killed = 0  # workers that had to go, for tests and reports
        self._template: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._idle: deque[RewardWorker] = deque()
        self._busy = 0
        self._room: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self.start()

    def start(self) -> None:
        """Starts the template process; it imports the reward while we do other things."""
        spec = self.spec
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        memory = None if spec.memory_gib is None else int(spec.memory_gib * 2**30)
        said = json.dumps(
            {
                "target": spec.target,
                "kind": spec.kind,
                "memory": memory,
                "path": sys.path,
                "preload": spec.preload,
            }
        )
        self._template = subprocess.Popen(
            [sys.executable, "-c", BOOT, str(theirs.fileno()), said],
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
        theirs.close()
        self._control = ours

    async def ready(self) -> list[int]:
        """The processes of all workers that wait for a call, when each of them is there."""
        for worker in list(self._idle):
            if worker.pid == 0:
                await self._greet(worker)
        return [w.pid for w in self._idle]

    async def call(self, name: str, given: Mapping[str, Any], count: int) -> RewardOutcome:
        """The scores of `count` completions. Raises what the reward raised."""
        request = {
            "name": name,
            "given": _plain(name, given),
            "count": count,
            "nonce": secrets.token_hex(8),
        }
        async with self._slot():
            worker = await self._worker()
            reply = None
            try:
                reply = await self._ask(worker, request)
            except WorkerCrashed:
                return RewardOutcome([None] * count, crashes=count)
            finally:  # also when we are cancelled: a worker in the middle of a call is of no use
                worker.calls += 1
                self._busy -= 1
                if reply is not None and not self.spec.fresh and worker.calls < CALLS:
                    self._idle.append(worker)
                else:
                    self._end(worker)
                    self._idle.append(self._order())  # the pool never shrinks
        return (
            RewardOutcome([None] * count, timeouts=count)
            if reply is None
            else _outcome(name, reply, count)
        )

    async def _ask(self, worker: RewardWorker, request: dict[str, Any]) -> dict[str, Any] | None:
        """The reply, or None if there was none in time."""
        worker.buffer.clear()
        reply: dict[str, Any] | None
        try:
            async with asyncio.timeout(self.spec.timeout):
                await worker.send(request)
                reply = await worker.receive()
        except TimeoutError:
            reply = worker.at_hand()
        except OSError as error:
            raise WorkerCrashed from error
        if reply is not None and (
            reply.get("nonce") != request["nonce"] or reply.get("raised") == "MemoryError"
        ):
            raise WorkerCrashed  # an answer to nothing that was asked: somebody else wrote it
        return reply

    def _slot(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._room is None or self._room[0] is not loop:
            self._room = (loop, asyncio.Semaphore(self.spec.workers))
        return self._room[1]

    async def _worker(self) -> RewardWorker:
        """One that has said hello. A template process that died is started again."""
        for _ in range(TRIES):
            self._idle.extend(
                self._order() for _ in range(self.spec.workers - self._busy - len(self._idle))
            )
            worker = self._idle.popleft()
            self._busy += 1
            try:
                if worker.pid == 0:
                    await self._greet(worker)
                return worker
            except (WorkerCrashed, OSError):  # with its template
                self._busy -= 1
                worker.channel.close()
            except BaseException:
                self._busy -= 1
                raise
        raise InputError(
            f"the process of {self.spec.target} died {TRIES} times before it could start.",
            where="rewards",
            fix=_why_it_died(),
        )

    async def _greet(self, worker: RewardWorker) -> None:
        try:
            async with asyncio.timeout(START):
                hello = await worker.receive()
        except TimeoutError:
            self.close()
            raise InputError(
                f"{self.spec.target} could not be imported in {START:g} s.",
                where="rewards",
                fix="Does importing it wait for something?",
            ) from None
        except asyncio.CancelledError:
            self._idle.append(worker)  # nobody has used it
            raise
        if hello["problem"] is not None:
            self.close()
            raise InputError(
                f"{self.spec.target} cannot be used in a process of its own: {hello['problem']}",
                where="rewards",
                fix=(
                    "Put it into a file that can be imported by itself, or set in_process: true for"
                    " this reward."
                )
                + _ulimit(),
            )
        worker.pid = hello["pid"]

    def _order(self) -> RewardWorker:
        """Asks the template for a worker; the worker's hello comes when it is there."""
        if self._template is None or self._template.poll() is not None:
            self.close()
            self.start()
        assert self._control is not None
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            socket.send_fds(self._control, [b"worker"], [theirs.fileno()])
        except OSError:  # it died just now: no hello will come
            pass
        theirs.close()
        return RewardWorker(ours)

    def _end(self, worker: RewardWorker) -> None:
        """SIGKILL for the worker and its children, by its parent, who knows that the number is
        still its own.
        """
        self.killed += 1
        worker.channel.close()
        try:
            assert self._control is not None
            self._control.send(str(worker.pid).encode())
        except OSError:  # the template is gone, and its workers with it
            pass

    def close(self) -> None:
        """Ends all processes."""
        while self._idle:
            self._idle.pop().channel.close()
        if self._control is not None:
            self._control.close()
        if self._template is not None:
            try:
                self._template.wait(1.0)
            except subprocess.TimeoutExpired:
                self._template.kill()  # its workers are told by the kernel
                self._template.wait()
        self._template = self._control = None


def _why_it_died() -> str:
    return _ulimit().strip() or "Does importing it exit?"


def _ulimit() -> str:
    """What a user should know where memory is limited from outside."""
    allowed = resource.getrlimit(resource.RLIMIT_AS)[0]
    if allowed == resource.RLIM_INFINITY:
        return ""
    return (
        f" Every process here may take {allowed / 2**30:.3g} GiB of address space (ulimit -v):"
        " importing may need more."
    )


def _outcome(name: str, reply: dict[str, Any], count: int) -> RewardOutcome:
    """What a worker said, believed as far as it is numbers."""
    if "raised" in reply:
        told = {name: str(reply.get(name, "")) for name in ("trace", "place", "line")}
        kind = type(str(reply["raised"]), (RewardRaised,), told)
        error = kind(str(reply.get("said")))
        if told["trace"]:
            error.add_note(f"In the process of the reward:\n{told['trace']}")
        raise error
    if "input_error" in reply:
        what, where, fix = reply["input_error"]
        raise InputError(str(what), where=where, fix=fix)
    scores = reply.get("scores")
    if (
        not isinstance(scores, list)
        or len(scores) != count
        or not all(s is None or (type(s) is float and abs(s) <= LARGEST_SCORE) for s in scores)
    ):
        return RewardOutcome([None] * count, crashes=count)
    return RewardOutcome(scores)


def _plain(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, value in given.items():
        try:
            plain[key] = encode(value)
        except NotPlainData as odd:
            raise InputError(
                f"reward {name} is given {key}, which holds a {odd}: it cannot be sent to a process"
                " of its own.",
                where="rewards",
                fix=(
                    "Leave the column out of its parameters, or set in_process: true for this"
                    " reward."
                ),
            ) from None
    return plain


_POOLS: dict[PoolSpec, RewardPool] = {}


def pool_of(spec: PoolSpec) -> RewardPool:
    """The pool of this process for a spec: importing a reward may take seconds, so it outlives the
    run that asked first.
    """
    if spec not in _POOLS:
        if not _POOLS:
            atexit.register(close_all)
        _POOLS[spec] = RewardPool(spec)
    return _POOLS[spec]


def close_all() -> None:
    while _POOLS:
        _POOLS.popitem()[1].close()
