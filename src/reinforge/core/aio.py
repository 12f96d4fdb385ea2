"""Several coroutines at once, and from plain code into coroutines, wherever it is called from."""

from __future__ import annotations

import asyncio
import queue
import signal
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar

T = TypeVar("T")


async def together(works: Iterable[Awaitable[T]]) -> list[T]:
    """All at once, the results in order. When one raises, or the caller is cancelled, the others
    are cancelled too.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def run_sync(work: Coroutine[Any, Any, T], interrupt: Callable[[], None] | None = None) -> T:
    """Runs a coroutine to its end, also inside a running event loop (a notebook): then in a thread
    of its own.

    Ctrl-C reaches only the main thread. There it calls `interrupt` (default: cancel the work); the
    work ends in its own way, and then KeyboardInterrupt comes out.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with EventLoop(interrupt) as loop:
        return loop.run(work)


def run_apart(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end in a thread of its own, wherever it is called from. Signals stay
    with whoever has them: for a part of a step that a run must finish before it stops.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="apart") as pool:
        return pool.submit(asyncio.run, work).result()


class EventLoop:
    """An event loop for work that plain code asks for piece by piece: what is under way in it rests
    between two calls of `run`. `build/execute.py` steps a run with one.

    Inside a running event loop (a notebook) it has a thread of its own. Ctrl-C there calls
    `interrupt` (default: cancel the work); the work ends in its own way, at once or in a later call
    of `run`, and KeyboardInterrupt comes out instead of what it raises. A second Ctrl-C does not
    wait. Elsewhere it is in the thread that calls, and leaves signals as they are.
    """

    def __init__(self, interrupt: Callable[[], None] | None = None):
        self.interrupt = interrupt
        self._runner = asyncio.Runner()
        self._thread: threading.Thread | None = None
        self._ctrl_c = False  # it came, and KeyboardInterrupt did not come out yet
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        self._thread = threading.Thread(target=self._serve, name="reinforge", daemon=True)
        self._ready = threading.Event()

    def __enter__(self) -> EventLoop:
        if self._thread is not None:
            self._thread.start()
            self._ready.wait()
        return self

    def __exit__(self, *error: object) -> None:
        """What is still under way is cancelled."""
        if self._thread is None:
            self._runner.close()
            return
        loop = self._runner.get_loop()
        with self._ctrl_c_calls(lambda: None):
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join()
        if self._ctrl_c and error == (None, None, None):
            self._raise_ctrl_c(None)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; what it raises is raised here."""
        if self._thread is None:
            return self._runner.get_loop().run_until_complete(work)
        loop = self._runner.get_loop()
        box: dict[str, Any] = {}
        done = threading.Event()

        async def main() -> None:
            task = box["task"] = asyncio.current_task()
            assert task is not None
            if self._ctrl_c and self.interrupt is None:  # it came before the task was there
                task.cancel()
            try:
                box["value"] = await work
            except BaseException as error:
                box["error"] = error
            finally:
                done.set()

        def cancel() -> None:
            if "task" in box:
                loop.call_soon_threadsafe(box["task"].cancel)

        with self._ctrl_c_calls(self.interrupt or cancel):
            asyncio.run_coroutine_threadsafe(main(), loop)
            done.wait()
        error = box.get("error")
        # who was asked to end and has not is let go on: its end comes in a later piece
        if self._ctrl_c and (error is not None or self.interrupt is None):
            self._raise_ctrl_c(error)
        if error is not None:
            raise error
        return box["value"]

    def _raise_ctrl_c(self, error: BaseException | None) -> NoReturn:
        self._ctrl_c = False
        raise KeyboardInterrupt from error

    def _serve(self) -> None:
        with self._runner as runner:
            loop = runner.get_loop()
            self._ready.set()
            loop.run_forever()

    @contextmanager
    def _ctrl_c_calls(self, interrupt: Callable[[], None]) -> Iterator[None]:
        """The first Ctrl-C calls `interrupt` and raises nothing: wherever it finds the main thread,
        nothing is cut. (asyncio.run would keep it for its own next await, which a thread that waits
        for another never reaches.)
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, frame: object) -> None:
            if self._ctrl_c:
                self._raise_ctrl_c(None)
            self._ctrl_c = True
            interrupt()

        before = signal.signal(signal.SIGINT, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


class Meanwhile(Generic[T]):
    """What a function returns or raises, called in a thread of its own: `after` so many seconds, by
    when the device has work and this thread has time, or as soon as somebody asks for the `result`.
    It does not keep the program from ending.
    """

    def __init__(self, function: Callable[[], T], name: str, *, after: float = 0.0):
        self._found: Future[T] = Future()
        self._asked = threading.Event()
        call = partial(self._call, function, after)
        threading.Thread(target=call, name=name, daemon=True).start()

    def _call(self, function: Callable[[], T], after: float) -> None:
        self._asked.wait(after)
        try:
            self._found.set_result(function())
        except BaseException as error:
            self._found.set_exception(error)

    def result(self) -> T:
        self._asked.set()
        return self._found.result()


class SerialThread:
    """A thread that calls one thing after the other, in the order in which they were asked for. It
    begins with the first, ends with this object, and does not keep the program from ending.
    """

    def __init__(self, name: str):
        self.name = name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] | None = None

    async def run(self, function: Callable[[], Any]) -> Any:
        if self._calls is None:
            self._calls = queue.SimpleQueue()
            weakref.finalize(self, self._calls.put, None)
            threading.Thread(target=_work, args=(self._calls,), name=self.name, daemon=True).start()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()

        def call() -> None:
            try:
                result = function()
                error = None
            except BaseException as raised:
                result = None
                error = raised
            try:
                loop.call_soon_threadsafe(_settle, done, result, error)
            except RuntimeError:  # the loop is closed: nobody waits
                pass

        self._calls.put(call)
        return await done


def _work(calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()


def _settle(done: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(result)
    else:  # a future does not take a StopIteration
        done.set_exception(
            RuntimeError(f"it raised {error!r}") if isinstance(error, StopIteration) else error
        )
