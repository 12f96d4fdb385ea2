"""The reward `code`: from a completion and a column of tests to a number, 0 for what is the
solution's fault and None for what is ours.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from sandbox_attacks import CHEATS, RIGHT

from helpers.sandboxes import containment
from reinforge.config.rewards import RewardConfig
from reinforge.core.errors import InputError
from reinforge.core.sample import Row
from reinforge.rewards import code as code_module
from reinforge.rewards.build import build_rewards
from reinforge.rewards.code import UNSAFE, CodeReward, code_reward, extract, parse_tests
from reinforge.sandbox import Limits, Program, detect
from reinforge.sandbox import isolation as isolations
from reinforge.sandbox.judge import (
    JudgeRules,
    Verdict,
    judge_asserts,
    judge_beside,
    judge_calls,
    judge_stdin,
)

WRONG = "def add(a, b):\n    return a - b"
HALF = "def add(a, b):\n    return a + b if b else 1"


@pytest.fixture(scope="module", autouse=True)
def contained() -> None:
    containment("own")


def fenced(code: str) -> str:
    return (
        f"First I tried\n```python\nbroken(\n```\nbut this is better:\n```python\n{code}\n```\nIt"
        " works."
    )


def scores(
    completions: list[str], tests: Any, columns: dict[str, Any] | None = None, **options: Any
) -> list[float | None]:
    (reward,) = build_rewards(
        [RewardConfig(name="code", options={"backend": "namespaces", "timeout": 5.0, **options})],
        device="cpu",
    )
    rows = [
        Row(str(i), "add two numbers", {"tests": tests, **(columns or {})})
        for i in range(len(completions))
    ]
    return asyncio.run(reward.score(rows, completions))


def test_extract() -> None:
    assert extract(fenced("x = 1\n\ny = 2")) == "x = 1\n\ny = 2"
    assert extract("x = 1") == "x = 1" and extract("") == ""
    assert extract("```\na\n```\n```py\nb = '''cut of") == "b = '''cut of"
    assert extract("  ```python\n  a\n  ```") == "  a"


@pytest.mark.parametrize(
    ("given", "kind", "cases", "entry"),
    [
        ([{"input": "1", "output": "2"}], "stdin", [("1", "2")], None),
        ({"inputs": ["1", "3"], "outputs": ["2", "4"]}, "stdin", [("1", "2"), ("3", "4")], None),
        ({"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}, "calls", [([1, 2], 3)], "add"),
        ('{"inputs": ["1"], "outputs": ["2"]}', "stdin", [("1", "2")], None),
        ([[[1, 2], 3]], "calls", [([1, 2], 3)], "f"),
        ([{"args": ["a"], "expected": None}], "calls", [(["a"], None)], "f"),
        (
            ["assert f(1) == 2", "assert f(2) == 3"],
            "asserts",
            ["assert f(1) == 2", "assert f(2) == 3"],
            "f",
        ),
        (
            "def check(candidate):\n    assert candidate(1)",
            "asserts",
            ["def check(candidate):\n    assert candidate(1)"],
            "f",
        ),
    ],
)
def test_the_usual_forms_of_tests(
    given: Any, kind: str, cases: list[Any], entry: str | None
) -> None:
    tests = parse_tests(given, "f" if entry == "f" else None)
    assert (tests.kind, tests.cases, tests.entry) == (kind, cases, entry)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "no tests"),
        ("{x", "no JSON"),
        ([[1, 2, 3]], "no test"),
        ([[[1], 2]], "nothing says which"),
        ({"input": 1}, "no tests"),
    ],
)
def test_tests_that_make_no_sense_are_told(given: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        parse_tests(given)


def test_calls_all_or_nothing_and_partial() -> None:
    tests = [[[2, 3], 5], [[1, 0], 1], [[7, 0], 7], [[0, 9], 9]]
    completions = [fenced(RIGHT), fenced(WRONG), fenced(HALF), RIGHT, "I do not know."]
    assert scores(completions, tests, entry_point="add") == [1.0, 0.0, 0.0, 1.0, 0.0]
    assert scores(completions, json.dumps(tests), {"entry_point": "add"}, partial=True) == [
        1.0,
        0.5,
        0.75,
        1.0,
        0.0,
    ]


def test_stdin_and_asserts() -> None:
    doubles = "print(2 * int(input()))"
    assert scores(
        [fenced(doubles), fenced("print(4)"), ""],
        [{"input": "2\n", "output": "4\n"}, {"input": "5", "output": "10"}],
        partial=True,
    ) == [1.0, 0.5, 0.0]
    check = (
        "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(2, 2) == 4"
    )
    for apart in (True, False):
        assert scores([fenced(RIGHT), fenced(WRONG)], check, entry_point="add", apart=apart) == [
            1.0,
            0.0,
        ]
        assert scores(
            [fenced(HALF)],
            ["assert add(1, 2) == 3", "assert add(5, 0) == 5"],
            apart=apart,
            partial=True,
        ) == [0.5]
    text = '#include <stdio.h>\nint main(){int a;scanf("%d",&a);printf("%d",2*a);}'
    assert scores([f"```c\n{text}\n```"], [["2", "4"]], language="c") == [1.0]


def test_beside_is_weaker_and_apart_is_not() -> None:
    """What docs/sandbox.md warns of: with `apart: false` a solution finds the secret in its own
    file and prints it.
    """
    forger = (
        "import re, os\ntext = open('main.py').read()\nprint(re.findall(r\"'([0-9a-f]{32})'\","
        " text)[-1], flush=True)\nos._exit(0)"
    )
    assert scores([forger], ["assert add(1, 2) == 3"], apart=False) == [1.0]
    assert scores([forger], ["assert add(1, 2) == 3"]) == [0.0]


def test_the_solutions_faults_are_zero_and_counted_ours_are_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reward = CodeReward(entry_point="add", timeout=1.5, memory_mb=200, backend="namespaces").open()
    tests = [[[2, 3], 5]]
    completions = [
        RIGHT,
        CHEATS["never returns"],
        CHEATS["grows"],
        CHEATS["leaves with success"],
        RIGHT,
    ]
    outcome = asyncio.run(reward(completions, tests=[tests] * 4 + [None]))
    assert outcome.scores == [1.0, 0.0, 0.0, 0.0, None] and outcome.crashes == 0
    # growing ends in a MemoryError, a raised call
    assert (reward.counts["judged"], reward.counts["timeout"]) == (2, 1), reward.counts
    assert reward.counts["failed_here"] == 0
    layout = isolations.layout
    monkeypatch.setattr(
        isolations,
        "layout",
        lambda packages=(): replace(layout(), binds=(*layout().binds, ("/no/such", "/no/such"))),
    )
    reward = CodeReward(
        entry_point="add", timeout=1.5, backend="namespaces", warm=False
    ).open()  # in this process, where the layout is broken
    outcome = asyncio.run(reward([RIGHT, CHEATS["never returns"]], tests=[tests] * 2))
    assert (
        outcome.scores == [None, None]
        and outcome.sandbox == 2
        and outcome.crashes == 0
        and reward.counts["failed_here"] == 2
    )


@pytest.mark.parametrize(
    "unreadable",
    [
        "{x",
        [[1, 2, 3]],
        {"inputs": ["1"], "outputs": []},
        {"inputs": None, "outputs": []},
        5,
        "[" * 100_000,
    ],
)
def test_a_row_whose_tests_make_no_sense_is_unscored_and_the_others_are_not(
    unreadable: Any,
) -> None:
    reward = CodeReward(entry_point="add", backend="namespaces", warm=False, workers=1).open()
    good = [[[2, 3], 5]]
    outcome = asyncio.run(reward([RIGHT, RIGHT, WRONG], tests=[good, unreadable, good]))
    assert outcome.scores == [1.0, None, 0.0] and outcome.lost == {1} and outcome.sandbox == 0
    assert reward.counts["unusable tests"] == 1 and reward.unusable and reward.pool is not None
    reward.pool.close()


# -- programs that take more than their share


class Neighbourhood:
    """Stands for the judge: `greedy` runs until `slow` has run out of time, and `slow` passes when
    it is alone.
    """

    def __init__(self, overlap: bool) -> None:
        self.overlap, self.running, self.seen = overlap, 0, []  # type: ignore[var-annotated]
        self.both = threading.Barrier(2)
        self.lock = threading.Lock()

    def __call__(self, isolation: Any, cancel: Any, code: str, *rest: Any) -> Verdict:
        with self.lock:
            self.running += 1
            self.seen.append((code, self.running))
        first = [name for name, _ in self.seen].count(code) == 1
        if self.overlap and first:
            self.both.wait(60)
            if code == "greedy":
                time.sleep(0.2)  # it is found out after the other has run out of time
        with self.lock:
            self.running -= 1
        if code == "greedy":
            return Verdict(0, 1, "timeout", greedy=True)
        return Verdict(0, 1, "timeout") if first else Verdict(1, 1)


@pytest.mark.parametrize("calls", [1, 2], ids=["one call", "two calls"])
def test_who_ran_out_of_time_beside_a_greedy_program_is_tried_once_more_alone(
    calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Neighbourhood(overlap=True)
    monkeypatch.setattr(code_module, "judge_calls", there)
    reward = CodeReward(entry_point="f", backend="namespaces", warm=False, workers=2).open()

    async def go() -> list[float | None]:
        programs = ["slow", "greedy"]
        tests = [[[1], 2]]
        asked = [programs] if calls == 1 else [[p] for p in programs]
        found = await asyncio.gather(*[reward(part, tests=[tests] * len(part)) for part in asked])
        return [score for outcome in found for score in outcome.scores]

    assert asyncio.run(go()) == [1.0, 0.0]
    assert sorted(name for name, _ in there.seen) == ["greedy", "slow", "slow"] and there.seen[
        -1
    ] == ("slow", 1)
    assert reward.tried_again == 1 and reward.pool is not None
    reward.pool.close()


def test_who_ran_out_of_time_by_itself_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Neighbourhood(overlap=False)
    monkeypatch.setattr(code_module, "judge_calls", there)
    # one after the other
    reward = CodeReward(entry_point="f", backend="namespaces", warm=False, workers=1).open()
    assert asyncio.run(reward(["slow", "greedy"], tests=[[[[1], 2]]] * 2)).scores == [0.0, 0.0]
    assert len(there.seen) == 2 and reward.tried_again == 0 and reward.pool is not None
    reward.pool.close()


@pytest.mark.parametrize("kind", ["calls", "asserts", "stdin", "beside"])
def test_verdicts_say_who_took_more_than_one_core(kind: str) -> None:
    here = containment("own")
    busy = "import os\nfor _ in range(8):\n    if os.fork() == 0:\n        while True: pass\n"
    rules = JudgeRules(Limits(seconds=60, cpu_seconds=2), total_seconds=60)
    waits = "while True: pass"
    function = f"{busy}def f(x):\n    {waits}\n    return x"
    verdict = {
        "calls": lambda: judge_calls(here, None, function, "f", [([1], 1)], rules),
        "asserts": lambda: judge_asserts(here, None, function, ["assert f(1) == 1"], "f", rules),
        "stdin": lambda: judge_stdin(
            here, None, Program(f"{busy}{waits}\nprint(1)"), [("", "1")], rules
        ),
        "beside": lambda: judge_beside(here, None, function, ["assert f(1) == 1"], rules),
    }[kind]()
    assert verdict.greedy and (verdict.passed, verdict.status) == (0, "timeout"), verdict


def test_too_large_tests_are_ours() -> None:
    assert scores([RIGHT], [[["x" * (1 << 21), "y"], "z"]], entry_point="add") == [None]


def test_without_containment_it_refuses_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "missing", lambda mode: "user namespaces are off")
    with pytest.raises(InputError, match="user namespaces are off"):
        build_rewards([RewardConfig(name="code")], device="cpu")
    (checked,) = build_rewards([RewardConfig(name="code")])  # only its options are looked at
    assert checked.notes == []
    (reward,) = build_rewards(
        [RewardConfig(name="code", options={"allow_unsafe": True, "entry_point": "add"})],
        device="cpu",
    )
    assert reward.notes == [UNSAFE]
    assert asyncio.run(reward.score([Row("1", "", {"tests": [[[1, 2], 3]]})], [RIGHT])) == [1.0]
    assert isinstance(reward.function, CodeReward) and reward.function.counts["unsafe"] == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"langauge": "c"}, "Did you mean language"),
        ({"language": "cobol"}, "unknown language"),
        ({"kind": "x"}, "no kind"),
        ({"timeout": -1}, "seconds must be above 0"),
    ],
)
def test_wrong_options_are_told(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        code_reward(options)


def test_what_does_not_go_together_is_told() -> None:
    with pytest.raises(InputError, match="needs the column tests"):
        asyncio.run(CodeReward(backend="namespaces")([RIGHT]))
    with pytest.raises(InputError, match="are for Python"):
        scores([""], [[[1], 2]], language="c", entry_point="f")
    with pytest.raises(InputError, match="a remote one cannot"):
        scores([""], ["assert f(1) == 2"], url="http://127.0.0.1:9")


@pytest.mark.parametrize(
    "value",
    [
        '{"t":"complex","v":[1' + "0" * 400 + ",0]}",
        '{"t":"dict","v":[[' + '{"t":"tuple","v":[' * 120 + "1" + "]}" * 120 + ",1]]}",
    ],
    ids=["huge", "deep"],
)
def test_an_answer_that_cannot_be_compared_is_wrong_and_costs_nobody_else(value: str) -> None:
    """Written past our encoder, straight into the channel."""
    containment("own")
    forged = f"""
import json, os
class Answer: pass
def add(a, b):
    frame = __import__("sys")._getframe()
    while frame is not None:
        for name, found in frame.f_locals.items():
            nonce = found.get("nonce") if isinstance(found, dict) else None
            if nonce:
                os.write(4, ('{{"nonce":"' + nonce + '","value":' + {value!r} + '}}\\n').encode())
                os._exit(0)
        frame = frame.f_back
    return 0
"""
    reward = CodeReward(entry_point="add", workers=1, backend="namespaces").open()
    reward.seconds = 1e-3  # all in one message
    try:
        outcome = asyncio.run(
            reward(
                [RIGHT, forged, RIGHT + "\n# too"],
                tests=[[[[2, 3], 5]], [[[2, 3], {"a": 1}]], [[[2, 3], 5]]],
            )
        )
    finally:
        assert reward.pool is not None
        reward.pool.close()
    assert outcome.scores == [1.0, 0.0, 1.0] and outcome.sandbox == 0
