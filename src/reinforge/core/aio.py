"""Several coroutines at once, and from plain code into a coroutine, wherever it is called from."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

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

    Ctrl-C reaches only the main thread. There it calls `interrupt` (default: cancel the work),
    waits for the work to end in its own way, and goes on as KeyboardInterrupt.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    box: dict[str, Any] = {}
    # an interrupted Thread.join takes the thread for ended and does not wait a second time
    done = threading.Event()

    async def main() -> T:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        box["cancel"] = lambda: loop.call_soon_threadsafe(task.cancel)
        return await work

    def target() -> None:
        try:
            box["value"] = asyncio.run(main())
        except BaseException as error:
            box["error"] = error
        finally:
            done.set()

    thread = threading.Thread(target=target, name="reinforge")
    with _ctrl_c_raises():
        try:
            thread.start()
            done.wait()
        except KeyboardInterrupt as ctrl_c:
            (interrupt or box.get("cancel", lambda: None))()
            done.wait()
            raise ctrl_c from box.get("error")
        finally:
            if done.is_set():
                thread.join()
    if "error" in box:
        raise box["error"]
    return box["value"]


@contextmanager
def _ctrl_c_raises() -> Iterator[None]:
    """asyncio.run keeps the first Ctrl-C for its own next await, which a thread that waits for
    another never reaches.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
