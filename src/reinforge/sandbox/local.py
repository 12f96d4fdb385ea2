"""Contained runs on this machine: `run` and `run_sync` for one program, `Pool` for many with a
bound on how many at once.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from reinforge.core.errors import InputError
from reinforge.sandbox.detect import Backend, choose
from reinforge.sandbox.isolation import Isolation
from reinforge.sandbox.process import Process
from reinforge.sandbox.program import Limits, Program, Result, command, interpreter, package_paths
from reinforge.sandbox.remote import run_remote
from reinforge.sandbox.workers import JudgeWorkers

P = ParamSpec("P")
T = TypeVar("T")
HERE = Path(__file__).parent
DEFAULT = Limits()


def run_sync(
    program: Program,
    limits: Limits = DEFAULT,
    isolation: Isolation | None = None,
    cancel: threading.Event | None = None,
) -> Result:
    """Run one program to its end, or to one of its limits.

    A machine that cannot contain it gives `refused`, and runs nothing.
    """
    try:
        isolation = isolation or choose()
        if isolation.url is not None:
            return run_remote(isolation.url, program, limits)
        argv, files = command(program, limits)
        stdin = (
            program.stdin
            if isinstance(program.stdin, bytes)
            else program.stdin.encode("utf-8", "surrogatepass")
        )
        with Process(
            isolation, argv, files, limits, stdin, node=program.language == "node", cancel=cancel
        ) as process:
            return process.finish()
    except (InputError, OSError) as error:  # cannot be contained; no processes or descriptors left
        return Result("refused", reason=str(error))


def drive(
    isolation: Isolation,
    module: str,
    limits: Limits,
    files: dict[str, bytes],
    cancel: threading.Event | None,
) -> Process:
    """Start one of our drivers (solution.py, asserts.py) inside, with a channel to it."""
    ours = {
        f"reinforge/sandbox/{name}.py": (HERE / f"{name}.py").read_bytes()
        for name in ("plain", module)
    }
    start = (
        f"import sys; sys.path.insert(0, '.'); from reinforge.sandbox import {module} as m;"
        f" sys.path[:1] = {package_paths(limits.packages)!r}; m.main()"
    )
    argv = [interpreter(), "-I", "-B", "-X", "utf8", "-c", start]
    return Process(
        isolation, argv, files | ours, limits, channel=True, cancel=cancel, driver=module
    )


class RunTurns:
    """Who runs beside whom: many at once, or one with nobody beside it.

    Used by the threads of a pool.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: dict[object, float] = {}  # since when
        self._alone = 0  # how many wait to be alone, or are

    @contextmanager
    def beside(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._alone)
            turn = object()
            self._running[turn] = time.monotonic()
        try:
            yield
        finally:
            with self._changed:
                del self._running[turn]
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Waits until those that run are done; those that come later wait for this one."""
        with self._changed:
            self._alone += 1
            self._changed.wait_for(lambda: not self._running)
            turn = object()
            self._running[turn] = time.monotonic()
        try:
            yield
        finally:
            with self._changed:
                self._alone -= 1
                del self._running[turn]
                self._changed.notify_all()

    def running_since(self, moment: float) -> bool:
        """Whether one is still running that had begun before that moment."""
        with self._changed:
            return any(since < moment for since in self._running.values())


class Pool:
    """At most `size` contained runs at once; more wait for their turn.

    Cancelling a call kills its run. `warm`: each thread has a process that judges for it and a
    launcher that is up already: a run then takes a quarter of the processor time, and next to none
    of this process. `note` is told what each call returned before its turn is over.
    """

    note: Callable[[Any], None] | None = None

    def __init__(
        self,
        size: int | None = None,
        *,
        backend: Backend = "auto",
        allow_unsafe: bool = False,
        url: str | None = None,
        warm: bool = False,
    ):
        self.isolation = Isolation("remote", url) if url else choose(backend, allow_unsafe)
        self._workers = JudgeWorkers() if warm and url is None else None
        self._turns = RunTurns()
        size = size or os.cpu_count() or 1
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="sandbox")
        if (workers := self._workers) is not None:  # they start while there is nothing to judge yet
            for _ in range(size):
                self._threads.submit(
                    lambda: workers.call(_nothing, self.isolation, threading.Event())
                )

    async def call(
        self,
        function: Callable[Concatenate[Isolation, threading.Event, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """`function(isolation, cancel, ...)` in a thread of the pool."""
        return await self._in(self._turns.beside, function, args, kwargs)

    async def call_alone(
        self,
        function: Callable[Concatenate[Isolation, threading.Event, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """The same, with nothing else of this pool running."""
        return await self._in(self._turns.alone, function, args, kwargs)

    async def _in(
        self,
        turn: Callable[[], AbstractContextManager[None]],
        function: Callable[..., T],
        args: Any,
        kwargs: Any,
    ) -> T:
        cancel = threading.Event()

        def go() -> T:
            with turn():
                if cancel.is_set():
                    raise OSError("cancelled")
                if self._workers is not None:
                    value: T = self._workers.call(function, self.isolation, cancel, *args, **kwargs)
                else:
                    value = function(self.isolation, cancel, *args, **kwargs)
                if self.note is not None:
                    self.note(value)
                return value

        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, go)
        except asyncio.CancelledError:
            cancel.set()
            raise

    def running_since(self, moment: float) -> bool:
        """Whether a call is still running that had begun before that moment (of the monotonic
        clock).
        """
        return self._turns.running_since(moment)

    async def run(self, program: Program, limits: Limits = DEFAULT) -> Result:
        return await self.call(_run, program, limits)

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        if self._workers is not None:
            self._workers.close()


def _nothing(isolation: Isolation, cancel: threading.Event | None) -> None:
    """What a worker is asked for first."""


def _run(
    isolation: Isolation, cancel: threading.Event | None, program: Program, limits: Limits
) -> Result:
    return run_sync(program, limits, isolation, cancel)


async def run(
    program: Program,
    limits: Limits = DEFAULT,
    *,
    backend: Backend = "auto",
    allow_unsafe: bool = False,
) -> Result:
    """One program, without holding the event loop up.

    A machine that cannot contain it gives `refused`.
    """
    cancel = threading.Event()
    try:
        isolation = await asyncio.to_thread(choose, backend, allow_unsafe)
        return await asyncio.to_thread(run_sync, program, limits, isolation, cancel)
    except InputError as error:
        return Result("refused", reason=str(error))
    except asyncio.CancelledError:
        cancel.set()
        raise
