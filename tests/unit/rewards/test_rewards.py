"""Rewards: parsing, calling users' functions, and never turning "could not be scored" into a
number.
"""

from __future__ import annotations

import asyncio
import threading
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.toys import run
from reinforge.config.rewards import RewardConfig
from reinforge.core.errors import InputError
from reinforge.core.sample import Row
from reinforge.rewards.build import build_rewards, load_function
from reinforge.rewards.builtin import FUNCTIONS
from reinforge.rewards.combine import total
from reinforge.rewards.function import FunctionReward, check_columns
from reinforge.rewards.names import BUILTIN
from reinforge.rewards.verifiable import exact_match, exact_number, last_number, regex

NUMBERS = {
    "the answer is 42": "42",
    "42.": "42",
    "-7": "-7",
    "3-7": "7",
    "x = -7": "-7",
    "1,234,567": "1234567",
    "0.50": "0.5",
    ".5": "0.5",
    "+3": "3",
    "12 apples, 7 left": "7",
    "1e3": None,
    "v2": None,
    "no idea": None,
    "": None,
    "7 8 9": "9",
    "= 1,019.": "1019",
    "10%": "10",
    "$5": "5",
    "9" * 41: None,
    "(12)": "12",
    "12/4": "4",
    "00012": "12",
    "1.2.3": None,
    "5\n": "5",
    "−5": "-5",
    "٣": None,
}


@pytest.mark.parametrize(("text", "want"), NUMBERS.items())
def test_last_number(text: str, want: str | None) -> None:
    found = last_number(text)
    # not numbers as people write them: any finite reading or none, but no crash
    if text in ("1e3", "1.2.3"):
        assert found is None or found.is_finite()
    else:
        assert found == (None if want is None else Decimal(want))


def test_exact_number() -> None:
    answers: list[Any] = ["12", 12, 12.0, "1,000", "no number", None, "-3"]
    texts = ["12", "it is 13", "so 12.0", "1000", "4", "4", "-3.0"]
    assert exact_number(texts, answers) == [1.0, 0.0, 1.0, 1.0, None, None, 1.0]
    assert exact_number(["3.14", "3.15"], ["3.1416"] * 2, tolerance=0.005) == [1.0, 0.0]
    assert exact_number(["0.1", ""], [0.1, 0.1]) == [1.0, 0.0]  # decimal, not binary


def test_exact_match_and_regex() -> None:
    assert exact_match([" Paris ", "paris", "Rome"], ["Paris"] * 3) == [1.0, 0.0, 0.0]
    assert exact_match([" Paris ", "paris"], ["Paris"] * 2, strip=False, ignore_case=True) == [
        0.0,
        1.0,
    ]
    assert exact_match(["x"], [None]) == [None]
    assert regex(["<a>\n1</a>", "1"], r"<a>.*</a>") == [1.0, 0.0] and regex(
        ["x1", "1"], r"\d", full=True
    ) == [0.0, 1.0]


def test_built_in_names_are_all_there() -> None:
    assert {*FUNCTIONS, "math", "judge", "http", "model", "process", "code"} == set(
        BUILTIN
    ) and len(set(BUILTIN)) == len(BUILTIN)


# users' functions

ROWS = [Row("r0", "p0", {"answer": "a", "level": 1}), Row("r1", "p1", {"answer": "b"})]


def score(
    function: Any, rows: list[Row] = ROWS, completions: list[str] | None = None, **kw: Any
) -> list[float | None]:
    return run(FunctionReward("mine", function, **kw).score(rows, completions or ["x", "y"]))


def test_columns_arrive_by_name() -> None:
    seen: dict[str, Any] = {}

    def everything(prompts, completions, **columns):  # type: ignore[no-untyped-def]
        seen.update(columns, prompts=prompts, completions=completions)
        return [1, 0]

    assert score(everything) == [1.0, 0.0]
    assert seen == {
        "prompts": ["p0", "p1"],
        "completions": ["x", "y"],
        "answer": ["a", "b"],
        "level": [1, None],
    }
    assert score(
        lambda completions, answer: [
            float(c + a == "xa") for c, a in zip(completions, answer, strict=True)
        ]
    ) == [1.0, 0.0]
    assert score(lambda completions, bonus, answer=None: [bonus, bonus], options={"bonus": 3}) == [
        3.0,
        3.0,
    ]
    with pytest.raises(InputError, match=r"needs gold, which the rows do not have.*answer"):
        score(lambda completions, gold: [0, 0])


def test_a_function_that_is_no_reward_is_told_how_one_is_called() -> None:
    def scalar(text: str) -> float:
        raise AssertionError

    how = r"f\(completions, \*\*columns\) and returns one number per completion"
    may = r"It may take: completions, prompts, completion_ids, answer, level\."
    with pytest.raises(InputError, match=rf"needs text, .*{how}\. {may}$"):
        score(scalar)
    rows = [Row("r", "p", {"answer": "a", "level": 1})]
    with pytest.raises(InputError, match=rf"\(columns: answer, level\).*{how}\. {may}$"):
        check_columns([FunctionReward("mine", scalar)], rows)
    mapped = r"Map a column with data\.columns.*; prompts and completions are always there\.$"
    for asks in (lambda prompts, gold: [], lambda completion_ids, gold: [], lambda gold, **_: []):
        with pytest.raises(InputError, match=mapped):
            check_columns([FunctionReward("mine", asks)], rows)


def test_a_column_cannot_replace_the_completions() -> None:
    rows = [Row("r", "p", {"completions": "forged", "prompts": "forged"})]
    assert score(
        lambda prompts, completions: [float((prompts, completions) == (["p"], ["real"]))],
        rows,
        ["real"],
    ) == [1.0]


@pytest.mark.parametrize(
    "value", [torch.tensor([1.0, 0.5]), (1.0, 0.5), [True, 0.5], [torch.tensor(1.0), 0.5]], ids=str
)
def test_number_like_results(value: Any) -> None:
    assert score(lambda completions: value) == [1.0, 0.5]


def test_none_stays_none() -> None:
    assert score(lambda completions: [None, 0.0]) == [None, 0.0]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([1.0], "1 values for 2"),
        ([1.0] * 3, "3 values for 2"),
        (1.0, "a float for 2"),
        (None, "a NoneType for 2"),
        ({"a": 1}, "a dict for 2"),
        ([float("nan"), 0.0], "returned nan"),
        ([float("inf"), 0.0], "returned inf"),
        (["1", 0.0], "returned '1'"),
        ("ab", "a str for 2"),
        (torch.tensor(1.0), "a float for 2"),
    ],
    ids=str,
)
def test_nonsense_is_refused(value: Any, says: str) -> None:
    with pytest.raises(InputError, match=f"reward mine returned {says}|{says}"):
        score(lambda completions: value)


def test_async_functions_are_awaited_together() -> None:
    running = 0
    most = 0

    async def judge(completions: list[str]) -> list[float]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return [0.25] * len(completions)

    class Judge:
        async def __call__(self, completions: list[str]) -> list[float]:
            return [0.5] * len(completions)

    async def work() -> None:
        reward = FunctionReward("judge", judge)
        results = await asyncio.gather(*(reward.score(ROWS, ["x", "y"]) for _ in range(4)))
        assert results == [[0.25, 0.25]] * 4 and most == 4
        assert await FunctionReward("object", Judge()).score(ROWS, ["x", "y"]) == [0.5, 0.5]

    run(work())


def test_a_slow_function_does_not_stop_the_loop() -> None:
    gate = threading.Event()

    def slow(completions: list[str]) -> list[float]:
        assert gate.wait(10)
        return [1.0] * len(completions)

    async def work() -> None:
        task = asyncio.ensure_future(FunctionReward("slow", slow).score(ROWS, ["x", "y"]))
        await asyncio.sleep(0.02)
        assert not task.done()
        gate.set()  # only a loop that still runs gets here
        assert await task == [1.0, 1.0]

    run(work())


def test_exceptions_pass_through() -> None:
    def broken(completions: list[str]) -> list[float]:
        raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
        score(broken)


# names and sums


def test_from_config(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def short(completions, limit=3, **_):\n    return [float(len(c) < limit) for c in"
        " completions]\n"
    )
    rewards = build_rewards(
        [
            RewardConfig(name="exact_match", weight=2.0),
            RewardConfig(name=f"{tmp_path}/mine.py:short", weight=-0.5, options={"limit": 5}),
            RewardConfig(name=f"{tmp_path}/mine.py:short"),
        ]
    )
    assert [(r.name, r.weight, r.pure) for r in rewards] == [
        ("exact_match", 2.0, True),
        ("short", -0.5, False),
        ("short_2", 1.0, False),
    ]
    assert run(rewards[1].score(ROWS, ["1234", "12345"])) == [1.0, 0.0] and run(
        rewards[2].score(ROWS, ["12", "1234"])
    ) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("exact_nubmer", "Did you mean exact_number"),
        ("nothing", "Built in: exact_match"),
        ("no_such_file.py:f", "no such file"),
        ("no_such_module_x:f", "cannot import"),
        ("math:no_such", "has no function"),
        ("math:pi", "has no function"),
    ],
)
def test_bad_names(name: str, says: str) -> None:
    with pytest.raises(InputError, match=rf"rewards\.0\.name.*{says}"):
        build_rewards([RewardConfig(name=name)])


def test_bad_options() -> None:
    with pytest.raises(InputError, match=r"rewards\.0\.options.*no option tolerence"):
        build_rewards([RewardConfig(name="exact_number", options={"tolerence": 1})])
    with pytest.raises(InputError, match="names no function"):
        load_function("plain", "x")


def test_total() -> None:
    weights = {"a": 2.0, "b": -0.5}
    assert (
        total({"a": 1.0, "b": 1.0}, weights) == 1.5 and total({"a": 0.0, "b": 0.0}, weights) == 0.0
    )
    assert total({"a": None, "b": None}, weights) is None


def test_total_leaves_out_a_component_that_could_not_be_scored() -> None:
    """A component that is None has no part in the sum; only a sample without any score
    is unscored.
    """
    assert total({"a": None, "b": 1.0}, {"a": 2.0, "b": -0.5}) == -0.5


@pytest.mark.parametrize(
    ("name", "option", "known"),
    [
        ("exact_number", "tolerence", "tolerance"),
        ("exact_number", "answer", "tolerance"),
        ("reasoning_gym", "entry", "extract"),
        ("regex", "patern", "pattern, full"),
    ],
)
def test_an_unknown_option_is_told_with_those_that_there_are(
    name: str, option: str, known: str
) -> None:
    """What comes with a row is none."""
    with pytest.raises(InputError, match=f"{name} has no option {option}") as told:
        build_rewards([RewardConfig.model_validate({"name": name, "options": {option: 1}})])
    assert str(told.value.fix) == f"It has: {known}."
    assert told.value.where == "rewards.0.options"
