"""Instructions with an input and an output: Alpaca's and Dolly's rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reinforge.core.errors import InputError
from reinforge.data.formats.columns import (
    OWN_PROMPTS,
    REPAIR,
    Message,
    Record,
    completion,
    first,
    has,
    label,
    system_turn,
    text,
)

ASKS = ("instruction",)
INPUTS = ("input", "context")  # what the instruction is about, often empty
OUTPUTS = ("output", "response")
OURS = (*OWN_PROMPTS, "messages")  # a row that has one of these is no Alpaca row


def is_alpaca(record: Record) -> bool:
    """Not a row with a prompt of its own, and not a text with columns of these names that hold
    something else.
    """
    if not has(record, *ASKS) or has(record, *OURS):
        return False
    if not has(record, "text"):
        return True
    try:
        question(record, "")
    except InputError:
        return False
    return True


def question(record: Record, place: str) -> dict[str, Any]:
    """The instruction and, on the next line, its input, as LLaMA-Factory joins them; after the
    system prompt and the earlier turns, if there are any.
    """
    asked = first(record, ASKS)
    about = first(record, INPUTS)
    parts = [part for part in (text(record, asked, place), text(record, about, place)) if part]
    if not parts:
        raise InputError(f"{asked} is empty, and so is its input", where=place, fix=REPAIR)
    before = [*system_turn(record, ("system",), place), *_history(record, place)]
    whole = "\n".join(parts)
    return {"prompt": [*before, {"role": "user", "content": whole}] if before else whole}


def output(record: Record, place: str) -> dict[str, Any]:
    return {**completion(record, *OUTPUTS), **label(record)}


def _history(record: Record, place: str) -> list[Message]:
    """Earlier turns: pairs of what was asked and what was answered."""
    turns = record.get("history") or []
    if not isinstance(turns, list) or not all(
        isinstance(t, list | tuple) and len(t) == 2 for t in turns
    ):
        raise InputError(
            "history is not a list of pairs [asked, answered]", where=place, fix=REPAIR
        )
    return [
        {"role": role, "content": said}
        for pair in turns
        for role, said in zip(("user", "assistant"), pair, strict=True)
    ]


def check_nothing_lost(record: Record, columns: Mapping[str, str], place: str) -> None:
    """Refuses a mapping that takes half of an Alpaca row for the prompt and leaves the other half,
    a text that is not empty, out.
    """
    taken = columns.get("prompt")
    if taken not in (*ASKS, *INPUTS):
        return
    halves = INPUTS if taken in ASKS else ASKS
    texts = [name for name in halves if isinstance(record.get(name), str) and record[name].strip()]
    left = [name for name in texts if name not in columns.values()]
    if left and has(record, *ASKS):
        raise InputError(
            f"data.columns takes the prompt from {taken}, and {left[0]} would be left out",
            where=place,
            fix=(
                "Remove prompt and completion from data.columns: these columns are read as they"
                f" are. To leave it out all the same, set data.template: '{{{taken}}}'."
            ),
        )
