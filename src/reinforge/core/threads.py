"""Code that blocks, beside an event loop that must not wait for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any


async def in_thread(function: Callable[..., Any], *given: Any) -> Any:
    """The function in a daemon thread of its own.

    Whoever stops waiting leaves it behind: a thread cannot be killed, and one that hangs must keep
    neither a pool nor the end of the process waiting.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if not future.done():
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

    def work() -> None:
        result = None
        error = None
        try:
            result = function(*given)
        except BaseException as raised:  # StopIteration cannot pass through a future
            error = (
                raised
                if isinstance(raised, Exception) and not isinstance(raised, StopIteration)
                else RuntimeError(repr(raised))
            )
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name="environment", daemon=True).start()
    return await future
