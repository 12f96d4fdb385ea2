"""Where a reward raised is told by the file and line that its author wrote."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from reinforge.core.sample import Row
from reinforge.rewards.function import FunctionReward
from reinforge.rewards.load import load_function
from reinforge.rewards.pool import PoolSpec, RewardPool
from reinforge.rewards.raised import raised_in_words

PROGRAM = """import json


def score(completions, **columns):
    return [json.loads(text)["answer"] for text in completions]


def helper(text):
    return int(text)


def called(completions, **columns):
    return [float(helper(text)) for text in completions]
"""


async def words(reward: FunctionReward, text: str) -> str:
    try:
        await reward.outcome([Row("r1", "p", {})], [text])
    except Exception as error:
        return raised_in_words(error)
    return "nothing was raised"


@pytest.mark.parametrize("in_pool", [False, True])
def test_a_reward_that_raises_is_told_by_file_and_line(tmp_path: Path, in_pool: bool) -> None:
    (tmp_path / "rewards.py").write_text(PROGRAM)

    async def told(name: str, text: str) -> str:
        target = f"{tmp_path / 'rewards.py'}:{name}"
        pool = RewardPool(PoolSpec(target, workers=1)) if in_pool else None
        reward = FunctionReward(name, load_function(target, "rewards"), pool=pool)
        try:
            return await words(reward, text)
        finally:
            if pool is not None:
                pool.close()

    with contextlib.chdir(tmp_path):
        assert asyncio.run(told("score", "{}")) == (
            "raised at rewards.py:5 in score: KeyError: 'answer' (the line: return"
            ' [json.loads(text)["answer"] for text in completions])'
        )
        # a library's own frames say less than the line that called it
        assert asyncio.run(told("score", "no json")).startswith(
            "raised at rewards.py:5 in score: JSONDecodeError: "
        )
        assert asyncio.run(told("called", "x")).startswith(
            "raised at rewards.py:9 in helper: ValueError: "
        )


def test_an_error_of_ours_has_no_place() -> None:
    assert raised_in_words(ValueError("odd")) == "raised ValueError: odd"
