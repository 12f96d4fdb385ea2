"""llguidance (`pip install 'reinforge[structured]'`), and what it can be asked without a
vocabulary: whether a constraint can be compiled at all. Imports nothing heavy, because `plan` asks
it before anything is loaded.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from reinforge.core.constraint import Constraint
from reinforge.core.errors import InputError

T = TypeVar("T")
LONGEST = 1 << 17  # characters of a constraint
# Of the thread that compiles, in bytes: llguidance calls itself for every rule of a chain, and a
# chain of a thousand would end the process in a usual one. Taken up only as far as it is used.
STACK = 1 << 29
NAMES = {
    "regex": "regular expression",
    "json_schema": "JSON schema",
    "json_object": "JSON object",
    "grammar": "grammar",
}


def library(where: str) -> Any:
    """The package. `where`: the key, option or parameter that needs it."""
    try:
        import llguidance
    except ImportError as error:
        raise InputError(
            f"answers of a given form need {error.name}, which is not installed.",
            where=where,
            fix="pip install 'reinforge[structured]'",
        ) from error
    return llguidance


def written(constraint: Constraint, where: str) -> str:
    """The constraint as llguidance wants it."""
    found = library(where)
    if len(constraint.text) > LONGEST:
        raise InputError(
            f"the {NAMES[constraint.kind]} has {len(constraint.text)} characters, and"
            f" {LONGEST} is the most that can be compiled.",
            where=where,
            fix="Make it shorter.",
        )
    if not constraint.text.strip() and constraint.kind != "json_object":
        raise InputError(f"the {NAMES[constraint.kind]} is empty.", where=where, fix="Write one.")
    match constraint.kind:
        case "regex":
            return str(found.grammar_from("regex", constraint.text))
        case "json_object":
            return str(found.grammar_from("json_schema", '{"type": "object"}'))
        case "json_schema":
            schema = _schema(constraint.text, where)
            return str(found.grammar_from("json_schema", json.dumps(schema)))
    try:
        return str(found.grammar_from("grammar", constraint.text))  # Lark, or GBNF
    except ValueError as error:
        raise wrong(constraint, str(error), where) from None


def _schema(text: str, where: str) -> Any:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"the JSON schema is not JSON: {error}.", where=where, fix="Give an object."
        ) from None
    if not isinstance(schema, dict | bool):
        raise InputError(
            f"a JSON schema is an object, not {text[:40]}.", where=where, fix="Give an object."
        )
    return schema


def wrong(constraint: Constraint, said: str, where: str) -> InputError:
    """The error: what llguidance says, without the pictures that it draws of the place."""
    said = re.split(r"\n\s+\d+ \|", said.strip())[0]
    words = " ".join(said.rpartition("\nerror:")[2].split())
    return InputError(
        f"this {NAMES[constraint.kind]} cannot be used: {words.rstrip('.')}.",
        where=where,
        fix="docs/structured.md says what can.",
    )


def deep(work: Callable[[], T]) -> T:
    """What the work gives, or raises, in a thread with room for deep recursion."""
    with ThreadPoolExecutor(1, thread_name_prefix="grammar") as thread:
        usual = threading.stack_size(STACK)
        try:
            future = thread.submit(work)  # starts the thread
        finally:
            threading.stack_size(usual)
        return future.result()


def check(constraint: Constraint, where: str) -> None:
    """Raises an `InputError` that names `where` for a constraint that cannot be compiled. Knows
    nothing of the model.
    """
    grammar = written(constraint, where)
    said = deep(lambda: library(where).LLMatcher.validate_grammar(grammar))
    if said and not said.startswith("WARNING"):
        raise wrong(constraint, said, where)
