"""Questions with a known answer, and traces of how it was found: verl's rows, RLVR's, problems with
solutions or generations, Orca's questions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reinforge.core.errors import InputError
from reinforge.data.formats.columns import (
    OWN_PROMPTS,
    Record,
    completion,
    first,
    has,
    system_turn,
    text,
)

SYSTEMS = ("system_prompt", "system")
# what a model thought, in a column of its own, and what it answered then
THOUGHTS = ("thinking", "reasoning", "reasoning_content", "deepseek_reasoning")
ANSWERED = ("response", "deepseek_solution", "solution", "answer")


# verl and RLVR


def is_verl(record: Record) -> bool:
    graded = record.get("reward_model")
    return isinstance(graded, Mapping) and "ground_truth" in graded


def verl(record: Record, place: str) -> dict[str, Any]:
    if not is_verl(record):
        raise InputError("reward_model has no ground_truth", where=place)
    return {} if has(record, "answer") else {"answer": record["reward_model"]["ground_truth"]}


def rlvr(record: Record, place: str) -> dict[str, Any]:
    return {} if has(record, "answer") else {"answer": record["ground_truth"]}


# problems


def is_problem(record: Record) -> bool:
    return not has(record, *OWN_PROMPTS)


def problem(record: Record, place: str) -> dict[str, Any]:
    """The problem, unless `messages` hold it together with its answer."""
    return {} if has(record, "messages") else {"prompt": text(record, "problem", place)}


def trace(record: Record, place: str) -> dict[str, Any]:
    """Of several generations the first that is complete and was found correct; else what was
    thought before the answer, in <think> tags; else the solution.
    """
    if has(record, "completion", "messages"):
        return {}
    if isinstance(record.get("generations"), list):
        found = _first_correct(record)
        return {} if found is None else {"completion": found}
    thought = first(record, THOUGHTS)
    if thought is not None:
        said = text(record, first(record, ANSWERED), place)
        return {"completion": f"<think>\n{text(record, thought, place)}\n</think>\n\n{said}"}
    return completion(record, "solution")


def _first_correct(record: Record) -> str | None:
    """None where none is both complete and correct."""
    marks = [
        record[name]
        for name in ("is_reasoning_complete", "correctness_math_verify")
        if isinstance(record.get(name), list)
    ]
    for i, generation in enumerate(record["generations"]):
        if all(i < len(mark) and mark[i] for mark in marks):
            return str(generation)
    return None


# questions with a system prompt of their own


def orca_question(record: Record, place: str) -> dict[str, Any]:
    asked = text(record, "question", place)
    before = system_turn(record, SYSTEMS, place)
    return {"prompt": [*before, {"role": "user", "content": asked}] if before else asked}


def response(record: Record, place: str) -> dict[str, Any]:
    return completion(record, "response")


def query(record: Record, place: str) -> dict[str, Any]:
    return {"prompt": text(record, "query", place)}
