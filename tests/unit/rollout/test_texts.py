"""Texts in a thread: whose are made together, in which order they are there, and who hears of an
error.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from reinforge.rollout import texts
from reinforge.rollout.texts import TextThread

Answers = Sequence[Sequence[int]]


def test_who_waits_is_made_together_with_the_first_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many groups as have so many tokens; every group gets its own texts, in order."""
    monkeypatch.setattr(texts, "TOGETHER", 6)
    go = threading.Event()
    calls: list[list[str]] = []

    def decode_all(answers: Answers) -> list[str]:
        assert go.wait(60.0)
        calls.append([" ".join(map(str, ids)) for ids in answers])
        return calls[-1]

    groups = [[[i], [i, i]] for i in range(7)]  # of three tokens
    thread = TextThread(decode_all)
    done: list[int] = []

    async def one(i: int) -> list[str]:
        found = await thread.of(groups[i])
        done.append(i)
        return found

    async def all_of_them() -> list[list[str]]:
        first = asyncio.ensure_future(one(0))
        await asyncio.sleep(0)
        while thread._waiting:  # until the thread has taken the first
            await asyncio.sleep(0.001)
        others = [asyncio.ensure_future(one(i)) for i in range(1, 7)]
        await asyncio.sleep(0)
        go.set()
        return list(await asyncio.gather(first, *others))

    assert asyncio.run(all_of_them()) == [[f"{i}", f"{i} {i}"] for i in range(7)]
    assert done == list(range(7))
    assert [len(call) for call in calls] == [2, 4, 4, 4]


def test_an_error_reaches_all_who_were_in_it_and_nobody_else() -> None:
    go = threading.Event()

    def decode_all(answers: Answers) -> list[str]:
        assert go.wait(60.0)
        if any(7 in ids for ids in answers):
            raise KeyError("no such token")
        return ["" for _ in answers]

    thread = TextThread(decode_all)

    async def all_of_them() -> list[list[str] | BaseException]:
        first = asyncio.ensure_future(thread.of([[1]]))
        await asyncio.sleep(0)
        while thread._waiting:  # until the thread has taken the first
            await asyncio.sleep(0.001)
        others = [asyncio.ensure_future(thread.of(a)) for a in ([[2]], [[7]])]
        await asyncio.sleep(0)
        go.set()
        return await asyncio.gather(first, *others, return_exceptions=True)

    alone, beside, wrong = asyncio.run(all_of_them())
    assert alone == [""] and isinstance(beside, KeyError) and isinstance(wrong, KeyError)
    assert asyncio.run(thread.of([[1], [2]])) == ["", ""]


def test_a_group_without_answers_has_no_texts() -> None:
    assert asyncio.run(TextThread(lambda answers: ["x"] * len(answers)).of([])) == []
