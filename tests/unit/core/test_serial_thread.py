"""Threads that do one thing after the other, and one thing meanwhile."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from functools import partial

import pytest

from reinforge.core.aio import Meanwhile, SerialThread


def named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_calls_are_done_in_the_order_in_which_they_were_asked_for() -> None:
    """The first takes longest, and no two run at once."""
    thread = SerialThread("in-order")
    done: list[int] = []
    busy = threading.Lock()

    def work(i: int) -> int:
        with busy:
            time.sleep(0.03 if i == 0 else 0.0)
            done.append(i)
        return i * i

    async def all_of_them() -> list[int]:
        seen = []

        async def one(i: int) -> int:
            found: int = await thread.run(partial(work, i))
            seen.append(i)
            return found

        found = await asyncio.gather(*(one(i) for i in range(8)))
        assert seen == list(range(8))
        return found

    assert not named("in-order")  # begins with the first call
    assert asyncio.run(all_of_them()) == [i * i for i in range(8)]
    assert done == list(range(8))
    assert asyncio.run(all_of_them()) == [i * i for i in range(8)]  # in another loop


def test_what_a_call_raises_is_raised_where_it_was_asked_for() -> None:
    thread = SerialThread("raises")

    def fails(error: BaseException) -> None:
        raise error

    with pytest.raises(KeyError, match="mine"):
        asyncio.run(thread.run(lambda: fails(KeyError("mine"))))
    with pytest.raises(RuntimeError, match="StopIteration"):  # a future takes none
        asyncio.run(thread.run(lambda: fails(StopIteration())))
    assert asyncio.run(thread.run(lambda: 3)) == 3  # it goes on


def test_the_thread_ends_with_its_owner() -> None:
    thread = SerialThread("ends")
    asyncio.run(thread.run(lambda: None))
    [running] = named("ends")
    del thread
    gc.collect()
    running.join(5)
    assert not running.is_alive()


def test_what_is_done_meanwhile_is_there_when_it_is_asked_for() -> None:
    """Who asks early does not wait for the moment at which it would have begun."""
    begun = threading.Event()

    def work() -> int:
        begun.set()
        return 7

    start = time.monotonic()
    late = Meanwhile(work, "late", after=3600.0)
    assert not begun.wait(0.05)
    assert late.result() == 7 and late.result() == 7
    assert time.monotonic() - start < 60.0
    begun.clear()
    soon = Meanwhile(work, "soon", after=0.01)
    assert begun.wait(60.0) and soon.result() == 7  # nobody asked, and it began
    assert not [thread for thread in named("late") + named("soon") if not thread.daemon]


def test_what_was_raised_meanwhile_comes_out() -> None:
    def fail() -> int:
        raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
        Meanwhile(fail, "fails").result()
