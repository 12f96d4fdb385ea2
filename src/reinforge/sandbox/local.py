"""Contained runs on this machine: `run` and `run_sync` for one program, `Pool` for many with a bound on how many at once."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from reinforge.core.errors import InputError
from reinforge.sandbox.isolation import Backend, Isolation, choose
from reinforge.sandbox.process import Process
from reinforge.sandbox.program import Limits, Program, Result, command, interpreter, package_paths
from reinforge.sandbox.remote import run_remote
from reinforge.sandbox.workers import Workers

P = ParamSpec("P")
T = TypeVar("T")
HERE = Path(__file__).parent
DEFAULT = Limits()


def run_sync(
    program: Program, limits: Limits = DEFAULT, isolation: Isolation | None = None, cancel: threading.Event | None = None
) -> Result:
    """Run one program to its end, or to one of its limits. A machine that cannot contain it gives `refused`, and runs nothing."""
    try:
        isolation = isolation or choose()
        if isolation.url is not None:
            return run_remote(isolation.url, program, limits)
        argv, files = command(program, limits)
        stdin = program.stdin if isinstance(program.stdin, bytes) else program.stdin.encode("utf-8", "surrogatepass")
        with Process(isolation, argv, files, limits, stdin, node=program.language == "node", cancel=cancel) as process:
            return process.finish()
    except (InputError, OSError) as error:  # cannot be contained; no processes or descriptors left
        return Result("refused", reason=str(error))


def drive(isolation: Isolation, module: str, limits: Limits, files: dict[str, bytes], cancel: threading.Event | None) -> Process:
    """Start one of our drivers (solution.py, asserts.py) inside, with a channel to it."""
    ours = {f"reinforge/sandbox/{name}.py": (HERE / f"{name}.py").read_bytes() for name in ("plain", module)}
    start = f"import sys; sys.path.insert(0, '.'); from reinforge.sandbox import {module} as m; sys.path[:1] = {package_paths(limits.packages)!r}; m.main()"
    argv = [interpreter(), "-I", "-B", "-X", "utf8", "-c", start]
    return Process(isolation, argv, files | ours, limits, channel=True, cancel=cancel, driver=module)


class Pool:
    """At most `size` contained runs at once; more wait for their turn. Cancelling a call kills its run. `warm`: each thread has a
    process that judges for it and a launcher that is up already: a run then takes a quarter of the processor time, and next to
    none of this process."""

    def __init__(
        self, size: int | None = None, *, backend: Backend = "auto", allow_unsafe: bool = False, url: str | None = None, warm: bool = False
    ):
        self.isolation = Isolation("remote", url) if url else choose(backend, allow_unsafe)
        self._workers = Workers() if warm and url is None else None
        size = size or os.cpu_count() or 1
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="sandbox")
        if (workers := self._workers) is not None:  # they start while there is nothing to judge yet
            for _ in range(size):
                self._threads.submit(lambda: workers.call(_nothing, self.isolation, threading.Event()))

    async def call(self, function: Callable[Concatenate[Isolation, threading.Event, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`function(isolation, cancel, ...)` in a thread of the pool."""
        cancel = threading.Event()
        if (workers := self._workers) is not None:
            future = asyncio.get_running_loop().run_in_executor(
                self._threads, lambda: workers.call(function, self.isolation, cancel, *args, **kwargs)
            )
        else:
            future = asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(self.isolation, cancel, *args, **kwargs))
        try:
            return await future
        except asyncio.CancelledError:
            cancel.set()
            raise

    async def run(self, program: Program, limits: Limits = DEFAULT) -> Result:
        return await self.call(_run, program, limits)

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        if self._workers is not None:
            self._workers.close()


def _nothing(isolation: Isolation, cancel: threading.Event | None) -> None:
    """What a worker is asked for first."""


def _run(isolation: Isolation, cancel: threading.Event | None, program: Program, limits: Limits) -> Result:
    return run_sync(program, limits, isolation, cancel)


async def run(program: Program, limits: Limits = DEFAULT, *, backend: Backend = "auto", allow_unsafe: bool = False) -> Result:
    """One program, without holding the event loop up. A machine that cannot contain it gives `refused`."""
    cancel = threading.Event()
    try:
        isolation = await asyncio.to_thread(choose, backend, allow_unsafe)
        return await asyncio.to_thread(run_sync, program, limits, isolation, cancel)
    except InputError as error:
        return Result("refused", reason=str(error))
    except asyncio.CancelledError:
        cancel.set()
        raise
