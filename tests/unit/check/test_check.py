"""`reinforge check`: what counts as having learned; and what a newcomer met on the way to it."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from reinforge.check import learning as checking
from reinforge.check.attacks import attacks
from reinforge.config.data import DataConfig
from reinforge.core.errors import InputError, StoppedByPolicy
from reinforge.core.sample import Row
from reinforge.data.sources import load_rows


@pytest.mark.parametrize(
    ("before", "after", "learned"),
    [
        (0.5, 0.85, True),
        (0.5, 0.75, False),
        (0.61, 1.0, True),
        (0.78, 0.95, True),
        (0.78, 0.85, False),
        (1.0, 1.0, False),
        (0.1, 0.39, False),
    ],
)
def test_a_rise_or_most_of_the_way(
    monkeypatch: pytest.MonkeyPatch, before: float, after: float, learned: bool
) -> None:
    monkeypatch.setattr(checking, "_first_and_last", lambda config, given: (before, after))
    if learned:
        assert checking.check()["learned"]
    else:
        with pytest.raises(StoppedByPolicy, match=f"from {before:.2f} to {after:.2f}"):
            checking.check()


def test_a_program_in_a_fence_stays_right_whatever_follows() -> None:
    row = Row("r", "add", {})
    for gold, tried in (("7", True), ("```python\ndef add(a, b):\n    return a + b\n```", False)):
        found = attacks(row, gold)
        assert [
            found[name] is not None
            for name in ("two answers", "the answer, taken back", "a wrong answer")
        ] == [tried, tried, True]


def test_a_task_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    config: dict[str, Any] = {"source": "reasoning_gym:chain_sum", "options": {"size": 2}}
    with pytest.raises(
        InputError, match=r"reasoning_gym:chain_sum.*pip install 'reinforge\[tasks\]'"
    ):
        load_rows(DataConfig(**config))
