"""Python functions as tools: the schema the model sees, the arguments they get, and the tools that
come with the library.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypedDict

import pytest

from helpers import needs
from helpers.toys import run
from reinforge.core.env import Action, Call, Step
from reinforge.core.errors import InputError
from reinforge.core.sample import Row
from reinforge.envs.shipped import SearchTool, calculator, shipped
from reinforge.envs.toolbox import CalculatorEnv, ToolEnv
from reinforge.envs.tools import Tool, ToolError, ToolUnavailable, fitted, tool


class Place(TypedDict):
    city: str
    zip: int


def forecast(
    place: Place,
    days: int = 3,
    unit: Literal["C", "F"] = "C",
    tags: list[str] | None = None,
    exact: bool | None = None,
) -> str:
    """Says what the weather
    will be.

    Args:
        place: Where, the city
            and its code
        days (int): How far ahead

    Returns:
        text
    """
    return f"{place['city']} {days} {unit}"


def test_the_schema_comes_from_hints_and_docstring() -> None:
    made = tool(forecast)
    assert (
        made.schema["type"] == "function"
        and made.name == "forecast"
        and made.description == "Says what the weather will be."
    )
    assert made.parameters == {
        "type": "object",
        "required": ["place"],
        "properties": {
            "place": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "zip": {"type": "integer"}},
                "required": ["city", "zip"],
                "description": "Where, the city and its code",
            },
            "days": {"type": "integer", "description": "How far ahead", "default": 3},
            "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
            "tags": {"type": "array", "items": {"type": "string"}, "default": None},
            "exact": {"type": "boolean", "default": None},
        },
    }


def untyped(x, *rest: int) -> int:  # type: ignore[no-untyped-def]
    return 0


def odd(x: Callable[[], int]) -> int:
    return 0


def test_what_no_schema_can_say_is_refused() -> None:
    for function in (untyped, odd):
        with pytest.raises(InputError, match=r"tool (untyped|odd)"):
            tool(function)


@pytest.mark.parametrize(
    "value,schema,expected",
    [
        (5, {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        ("2.5", {"type": "number"}, 2.5),
        (4.0, {"type": "integer"}, 4),
        ("true", {"type": "boolean"}, True),
        (["1", 2], {"type": "array", "items": {"type": "integer"}}, [1, 2]),
        ("x", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "x"),
        (None, {}, None),
    ],
)
def test_values_are_made_to_fit_where_nothing_is_lost(
    value: Any, schema: dict[str, Any], expected: Any
) -> None:
    found = fitted(value, schema, "f: x")
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(
    "value,schema,why",
    [
        ("five", {"type": "integer"}, 'must be a whole number, not "five"'),
        (True, {"type": "integer"}, "must be a whole number"),
        (2.5, {"type": "integer"}, "whole number"),
        ("K", {"type": "string", "enum": ["C", "F"]}, 'one of ["C", "F"]'),
        ({}, {"type": "array"}, "must be a list"),
        ([], {"anyOf": [{"type": "integer"}]}, "fits nothing"),
    ],
)
def test_values_that_do_not_fit_are_told(value: Any, schema: dict[str, Any], why: str) -> None:
    with pytest.raises(ToolError) as caught:
        fitted(value, schema, "f: x")
    assert why in str(caught.value)


# ---- conversations ----


def step(env: ToolEnv, *calls: Call, **more: Any) -> Step:
    async def go() -> Step:
        await env.reset(Row("r", "hi"), 0)
        return await env.step(Action("t", [], calls=calls, **more))

    return run(go())


def said(env: ToolEnv, *calls: Call) -> list[str]:
    observation = step(env, *calls).observation
    assert observation is not None and all(m["role"] == "tool" for m in observation.messages)
    return [m["content"] for m in observation.messages]


def slow(seconds: float) -> str:
    """Sleeps."""
    time.sleep(seconds)
    return "awake"


async def nap(seconds: float) -> dict[str, float]:
    """Sleeps, too."""
    await asyncio.sleep(seconds)
    return {"slept": seconds}


def broken() -> str:
    """Breaks."""
    raise KeyError("pieces")


def offline() -> str:
    """Cannot work."""
    raise ToolUnavailable("no network")


def test_calls_are_answered_in_order_and_at_once() -> None:
    start = time.monotonic()
    env = ToolEnv([slow, nap, "calculator"])
    calls = [
        Call("slow", {"seconds": 0.2}, "a"),
        Call("nap", {"seconds": 0.2}, "b"),
        Call("calculator", {"expression": "6*7"}, "c"),
    ]
    assert (
        said(env, *calls) == ["awake", '{"slept": 0.2}', "42"] and time.monotonic() - start < 0.39
    )
    observation = step(env, *calls).observation
    assert observation is not None and [m["tool_call_id"] for m in observation.messages] == [
        "a",
        "b",
        "c",
    ]
    assert not env.pure and ToolEnv(["calculator"]).pure


def test_what_goes_wrong_is_said_to_the_model() -> None:
    env = ToolEnv([slow, broken, "calculator"], tool_seconds=0.1, max_characters=40)
    assert said(env, Call("abacus", {})) == [
        "error: there is no tool abacus; there ar\n... (27 characters more)"
    ]
    env.max_characters = 1000
    assert said(env, Call("slow", {"seconds": 5})) == ["error: slow took longer than 0.1 s"]
    assert said(env, Call("broken", {})) == ["error: KeyError: 'pieces'"]
    assert said(env, Call("calculator", {"expr": "1"})) == [
        "error: calculator has no argument expr; it has: expression"
    ]
    assert said(env, Call("calculator", {})) == ["error: calculator needs the argument expression"]
    assert said(env, Call("calculator", {"expression": "1/0"})) == ["error: division by zero"]


def test_a_tool_that_cannot_work_is_not_the_models_fault() -> None:
    with pytest.raises(ToolUnavailable, match="no network"):
        step(ToolEnv([offline]), Call("offline", {}))


def test_malformed_calls_are_explained_and_nothing_is_called() -> None:
    found = step(ToolEnv([broken]), Call("broken", {}), errors=["the call is not valid JSON: x"])
    assert found.observation is not None and not found.done
    assert found.observation.messages == [
        {
            "role": "user",
            "content": (
                "The tool call could not be read, and nothing was called:\n- the call is not valid"
                " JSON: x"
            ),
        }
    ]


def test_an_answer_without_a_call_ends_the_episode() -> None:
    env = ToolEnv(["calculator"])
    assert step(env) == Step(None, None, done=True, metrics={"used_tools": 0.0})
    cut = step(env, Call("calculator", {"expression": "1"}), last=True)
    assert cut.done and cut.truncated and cut.observation is None


def test_the_calculator_task_scores_the_last_number() -> None:
    async def score(text: str) -> float | None:
        env = CalculatorEnv()
        observation = await env.reset(Row("r", "12*34=", {"answer": "408"}), 0)
        assert (
            observation.tools is not None
            and observation.tools[0]["function"]["name"] == "calculator"
        )
        return (await env.step(Action(text, []))).reward

    assert [run(score(t)) for t in ("It is 408.", "400 or 407", "no idea")] == [1.0, 0.0, 0.0]


def test_tools_by_name(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        'def twice(n: int) -> int:\n    """Doubles."""\n    return 2 * n\n'
    )
    env = ToolEnv([f"{tmp_path}/mine.py:twice"])
    assert said(env, Call("twice", {"n": "21"})) == ["42"]
    with pytest.raises(InputError, match="there is no tool 'abacus'"):
        ToolEnv(["abacus"])


# ---- shipped ----


@pytest.mark.parametrize(
    "text,value",
    [
        ("(12 + 7) * 3", "57"),
        ("7/2", "3.5"),
        ("8/2", "4"),
        ("2^10", "1024"),
        ("-3 - -4", "1"),
        ("17 % 5 + 9//2", "6"),
        ("12×34=", "408"),
        ("sqrt(16) + max(1, 2, 3)", "7"),
        ("0.1+0.2", "0.30000000000000004"),
        ("99999999999*99999999999", "9999999999800000000001"),
    ],
)
def test_the_calculator(text: str, value: str) -> None:
    assert calculator(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "9**9**9**9",
        "2**(10**8)",
        "10**400/3",
        "1e308*10",
        "__import__('os').system('true')",
        "(1).__class__",
        "[1]*10**9",
        "'a'*9",
        "x",
        "1 if 1 else 2",
        "",
        "(" * 900,
        "1+" * 500,
        "1;2",
        "lambda: 1",
        "abs(x=1)",
        "max(" + "1," * 300 + ")",
        "True",
        "sqrt(-1)",
        "(-8)**0.5",
        "1j*1j",
    ],
)
def test_the_calculator_evaluates_nothing_but_arithmetic(text: str) -> None:
    start = time.monotonic()
    with pytest.raises(ToolError):
        calculator(text)
    assert time.monotonic() - start < 1.0


def test_search_is_bm25(tmp_path: Path) -> None:
    """By hand: 3 paragraphs of 2, 3 and 4 words, mean 3; `cat` is in two of them, once each, so
    shorter is better.
    """
    (tmp_path / "a.txt").write_text("black cat\n\nThe dog barks")
    (tmp_path / "b.md").write_text("A cat sat there")
    (tmp_path / "c.bin").write_text("cat cat cat")
    search = SearchTool(str(tmp_path), results=2)
    import math

    idf = math.log(1 + (3 - 2 + 0.5) / (2 + 0.5))
    expected = [idf * 2.2 / (1 + 1.2 * (0.25 + 0.75 * n / 3)) for n in (2, 4)]
    assert search.scores("Cat") == pytest.approx([expected[0], 0.0, expected[1]])
    assert (
        search("cat") == "[a.txt] black cat\n\n[b.md] A cat sat there"
        and search("zebra") == "nothing found"
    )
    found = shipped("search", {"path": str(tmp_path), "results": 1})
    assert (
        isinstance(found, Tool)
        and found.parameters["required"] == ["query"]
        and found.function("dog") == "[a.txt] The dog barks"
    )
    with pytest.raises(InputError, match="no text files"):
        SearchTool(str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match="needs a path"):
        ToolEnv(["search"])


class Refusing:
    """A sandbox on a machine that cannot contain anything."""

    class Program:
        def __init__(self, code: str): ...

    class Limits:
        def __init__(self, seconds: float): ...

    class Result:
        failed_here = True
        reason = "no namespaces"
        status = "refused"

    @staticmethod
    async def run(program: Any, limits: Any) -> Any:
        return Refusing.Result()


def test_python_fails_closed() -> None:
    """Where nothing can contain the program it is not run, and the episode is not scored."""
    made = shipped("python", {})
    assert (
        made is not None
        and made.name == "python"
        and not made.pure
        and made.parameters["required"] == ["code"]
    )
    made.function.sandbox = Refusing  # type: ignore[attr-defined]
    with pytest.raises(ToolUnavailable, match="no namespaces"):
        step(ToolEnv([made]), Call("python", {"code": "print(1)"}))


def test_python_runs_in_the_sandbox() -> None:
    made = shipped("python", {"seconds": 5.0})
    assert made is not None
    try:
        found = said(ToolEnv([made]), Call("python", {"code": "print(6*7)"}))
    except ToolUnavailable as error:
        needs.missing("sandbox", str(error))
    assert found == ["42"]
    assert "ZeroDivisionError" in said(ToolEnv([made]), Call("python", {"code": "1/0"}))[0]
