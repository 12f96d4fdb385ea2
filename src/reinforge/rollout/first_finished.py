"""Many rollouts at once, and the right to stop waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


async def first_finished(works: Sequence[Awaitable[T]], enough: Callable[[int, T], bool]) -> None:
    """Runs all of `works` and shows `enough` each result (place, result) in the order of
    completion. Ends when it says True, or when all are done. The first failure ends it too and is
    raised. Whatever is left is cancelled, and waited for: nothing that was started here outlives
    the call.
    """
    if not works:
        return
    tasks: list[asyncio.Future[T]] = [asyncio.ensure_future(work) for work in works]
    places = {task: place for place, task in enumerate(tasks)}
    finished: asyncio.Queue[asyncio.Future[T]] = asyncio.Queue()
    for task in tasks:
        task.add_done_callback(finished.put_nowait)
    try:
        for _ in tasks:
            task = await finished.get()
            if enough(places[task], task.result()):
                break
    finally:
        left = [task for task in tasks if not task.done()]
        for task in left:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def all_finished(works: Sequence[Awaitable[T]]) -> list[T]:
    """The results of all of `works`, in their order. A failure of one cancels the others."""
    done: dict[int, T] = {}

    def keep(place: int, result: T) -> bool:
        done[place] = result
        return False

    await first_finished(works, keep)
    return [done[place] for place in range(len(works))]
