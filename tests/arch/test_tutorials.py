"""What the tutorials have their reader write does what they say."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from helpers.source_tree import ROOT
from reinforge.core.env import Action
from reinforge.core.sample import Row

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def run(page: str, number: int) -> dict[str, Any]:
    """The names that a Python block of a tutorial defines."""
    text = (ROOT / "docs/tutorials" / page).read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(compile(BLOCK.findall(text)[number], page, "exec"), names)
    return names


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_rows_of_the_tutorials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run("sft.md", 0)
    tickets = rows_of(tmp_path / "tickets.jsonl")
    teams = [row["output"] for row in tickets]
    assert len({row["input"] for row in tickets}) == 72
    assert [teams.count(team) for team in ("billing", "shipping", "technical")] == [24, 24, 24]
    # the first that `data show` prints on the page
    assert tickets[0]["input"] == "I cannot log in to set up the radio"

    run("reward.md", 0)
    sums = rows_of(tmp_path / "sums.jsonl")
    assert len(sums) == 600 and sums[0] == {"prompt": "6+6+0=", "answer": "12"}
    run("environment.md", 1)
    questions = rows_of(tmp_path / "questions.jsonl")
    assert [(row["question"], row["answer"]) for row in questions] == [
        (row["prompt"], row["answer"]) for row in sums
    ]


def test_the_reward_has_the_two_holes_that_are_found_and_mended() -> None:
    near = run("reward.md", 1)["near"]
    said = ["12", " 11 ", "14", "15", "twelve", ""]
    assert near(said, ["12"] * 6) == [1.0, 0.3, 0.1, 0.0, 0.0, 0.0]
    fullwidth = "\uff11\uff12"
    assert near([fullwidth], ["12"]) == [1.0]
    with pytest.raises(ValueError, match="4300 digits"):
        near(["1" * 100_000], ["12"])
    is_number = run("reward.md", 2)["is_number"]
    assert [is_number(word) for word in ("12", fullwidth, "1" * 100_000, "", "-1")] == [
        True,
        False,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("answers", "rewards"),
    [(["12"], [1.0]), (["9", " 12"], [None, 0.5]), (["9", "9"], [None, 0.0])],
)
def test_the_environment_asks_twice(answers: list[str], rewards: list[float | None]) -> None:
    game = run("environment.md", 0)["SecondTry"]()
    row = Row("0", "3+4+5=", {"question": "3+4+5=", "answer": "12"})

    async def play() -> list[float | None]:
        asked = await game.reset(row, seed=0)
        found = []
        for answer in answers:
            assert asked.messages == [{"role": "user", "content": "3+4+5="}]
            step = await game.step(Action(answer, []))
            found.append(step.reward)
            asked = step.observation
        assert step.done and asked is None
        return found

    assert asyncio.run(play()) == rewards
