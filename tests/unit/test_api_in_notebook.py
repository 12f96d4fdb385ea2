"""`reinforge.train` inside a running event loop, as in a notebook: it works in a thread of its own,
and Ctrl-C reaches it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import reinforge
from reinforge.checkpoint import store
from reinforge.core.aio import EventLoop, run_sync
from reinforge.core.errors import InputError

ROWS = [{"prompt": f"{i}: "} for i in range(32)]
SMALL: dict[str, Any] = dict(
    steps=1, group_size=4, prompts_per_step=2, max_new_tokens=4, overrides=["rollout.kv_gib=0.01"]
)


def test_inside_a_running_event_loop(tiny_dir: str, tmp_path: Path) -> None:
    """As in a notebook: called in a coroutine, with an async reward; errors come out as
    they are.
    """
    called = []

    async def judge(completions: list[str], **_: Any) -> list[float]:
        await asyncio.sleep(0)
        called.append(len(completions))
        return [float(len(c) % 3) for c in completions]

    async def broken(completions: list[str], **_: Any) -> list[float]:
        raise RuntimeError("judge is down")

    async def notebook() -> None:
        result = reinforge.train(
            model=tiny_dir, data=ROWS, rewards=[judge], dir=str(tmp_path / "a"), **SMALL
        )
        assert result.steps == 1 and called == [4, 4]
        with pytest.raises(InputError, match="judge is down"):
            reinforge.train(
                model=tiny_dir, data=ROWS, rewards=[broken], dir=str(tmp_path / "b"), **SMALL
            )

    asyncio.run(asyncio.wait_for(notebook(), 60))


def test_run_sync_hands_on_values_and_errors() -> None:
    async def value() -> int:
        return 7

    async def error() -> int:
        raise KeyError("x")

    async def inside() -> tuple[int, str]:
        with pytest.raises(KeyError):
            run_sync(error())
        return run_sync(value()), "ok"

    assert run_sync(value()) == 7 and asyncio.run(inside()) == (7, "ok")


# Ctrl-C


def test_ctrl_c_in_a_notebook_ends_the_run_with_a_checkpoint(tiny_dir: str, tmp_path: Path) -> None:
    """The main thread waits for the training thread: the run saves, the thread ends, and
    KeyboardInterrupt comes out.
    """
    arguments: dict[str, Any] = dict(
        model=tiny_dir, data=ROWS, dir=tmp_path / "run", **{**SMALL, "steps": 50}
    )
    calls = [0]

    def interrupting(completions: list[str]) -> list[float]:
        calls[0] += 1
        if calls[0] == 5:  # two prompts per step: in the third
            os.kill(os.getpid(), signal.SIGINT)
        return [0.5] * len(completions)

    async def notebook() -> None:
        with pytest.raises(KeyboardInterrupt):
            reinforge.train(rewards=interrupting, **arguments)
        assert not any(t.name == "reinforge" for t in threading.enumerate())

    before = signal.getsignal(signal.SIGINT)
    asyncio.run(notebook())
    assert signal.getsignal(signal.SIGINT) is before
    events = [
        json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    ]
    step = store.step_of(store.steps(tmp_path / "run")[0])
    assert events[-1]["kind"] == "terminated" and 2 <= step <= 20 and events[-1]["step"] == step
    done = calls[0]
    assert (
        reinforge.train(rewards=interrupting, **{**arguments, "steps": step + 2}).steps == step + 2
        and calls[0] > done
    )  # it goes on from there


def test_a_run_that_ends_later_is_not_cut() -> None:
    """Ctrl-C while a piece is under way that takes no notice of it: its value comes, and so does
    that of every piece until the work ends of itself. A second one does not wait.
    """
    asked = []

    async def piece(number: int, error: Exception | None = None) -> int:
        if number == 1:
            os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.02)
        if error is not None:
            raise error
        return number

    async def notebook() -> None:
        with EventLoop(lambda: asked.append(True)) as loop:
            assert [loop.run(piece(number)) for number in range(3)] == [0, 1, 2]
            assert asked == [True]
            with pytest.raises(KeyboardInterrupt) as out:
                loop.run(piece(3, RuntimeError("stopped")))
            assert str(out.value.__cause__) == "stopped"
            with pytest.raises(RuntimeError):
                loop.run(piece(4, RuntimeError("of its own")))
        with pytest.raises(KeyboardInterrupt), EventLoop(lambda: None) as loop:
            assert loop.run(piece(1)) == 1  # and nothing follows
        with EventLoop(lambda: None) as loop, pytest.raises(KeyboardInterrupt):
            loop.run(piece(1))
            loop.run(piece(1))

    asyncio.run(notebook())


def test_ctrl_c_cancels_other_work() -> None:
    ended = []

    async def work() -> None:
        asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(30)
        finally:
            ended.append(True)

    async def notebook() -> None:
        with pytest.raises(KeyboardInterrupt):
            run_sync(work())

    asyncio.run(notebook())
    assert ended == [True]
