"""The rows of benchmarks/gpu_code_reward.py: nothing held out is trained on, and the reward knows
right from wrong.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys

import pytest

from helpers.paths import ROOT
from reinforge.rewards.code import CodeReward

PATH = ROOT / "benchmarks" / "gpu_code_reward.py"


@pytest.fixture(scope="module")
def bench():  # type: ignore[no-untyped-def]
    spec = importlib.util.spec_from_file_location("gpu_code_reward", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_code_reward"] = module
    spec.loader.exec_module(module)
    return module


def test_held_out_rows_are_others(bench) -> None:  # type: ignore[no-untyped-def]
    train, test = bench.rows(0, 240)
    asked = [{r["prompt"][-1]["content"] for r in part} for part in (train, test)]
    assert (len(train), len(test)) == (16 * 80, 240) and not asked[0] & asked[1]
    assert bench.rows(0, 240) == (train, test) and bench.rows(1, 240)[1] != test


def test_the_reward_runs_what_was_written(bench) -> None:  # type: ignore[no-untyped-def]
    kinds = bench.SIMPLE + bench.HARDER
    made = [bench.row(words, expression, 7) for words, expression in kinds]
    right = [
        f"```python\ndef f(a, b):\n    return {expression.format(k=7)}\n```"
        for _, expression in kinds
    ]
    off = [
        f"```python\ndef f(a, b):\n    return {expression.format(k=8)}\n```\nDone."
        for _, expression in kinds
    ]
    reward = CodeReward(timeout=20, total_timeout=60, workers=2, backend="namespaces").open()
    tests = [json.loads(r["tests"]) for r in made]
    outcome = asyncio.run(
        reward([*right, *off], tests=[*tests, *tests], entry_point=["f"] * 2 * len(kinds))
    )
    assert outcome.scores == [1.0] * len(kinds) + [0.0] * len(kinds) and outcome.crashes == 0
    assert reward.pool is not None
    reward.pool.close()
