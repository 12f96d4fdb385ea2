"""Rows that compare two answers: texts and conversations that part, HH's dialogues, OpenAI's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from reinforge.core.errors import InputError
from reinforge.data.formats.columns import OWN_PROMPTS, Message, Record, has
from reinforge.data.formats.turns import sides

# a turn of Anthropic's dialogues begins so, on a line of its own after an empty one
SPEAKER = re.compile(r"(?:\A|\n\n)\s*(Human|Assistant):")
ROLES = {"Human": "user", "Assistant": "assistant"}


def is_pair(record: Record) -> bool:
    return has(record, "chosen") and has(record, "rejected")


# whole conversations and whole texts


def is_conversation_pair(record: Record) -> bool:
    """Both sides are conversations that begin with the question, as UltraFeedback's are."""
    return is_pair(record) and all(
        isinstance(record[side], list) and _asks(record[side]) for side in ("chosen", "rejected")
    )


def is_text_pair(record: Record) -> bool:
    """Both sides are texts, and the question stands in them or nowhere."""
    return (
        is_pair(record)
        and not has(record, *OWN_PROMPTS, "instruction")
        and any(isinstance(record[side], str) for side in ("chosen", "rejected"))
    )


def conversation_pair(record: Record, place: str) -> dict[str, Any]:
    """What both begin with is the prompt, and the rest are the answers."""
    both = {**record, **sides(record, place)}
    chosen = both["chosen"]
    rejected = both["rejected"]
    return _parted(chosen, rejected, _shared(chosen, rejected), place)


def text_pair(record: Record, place: str) -> dict[str, Any]:
    chosen = record["chosen"]
    rejected = record["rejected"]
    _same_kind(chosen, rejected, place)
    return _parted(chosen, rejected, _shared_text(chosen, rejected), place)


def answers(record: Record, place: str) -> dict[str, Any]:
    """Answers to a prompt that stands beside them."""
    both = sides(record, place)
    _same_kind(
        both.get("chosen", record["chosen"]), both.get("rejected", record["rejected"]), place
    )
    return both


def _same_kind(chosen: Any, rejected: Any, place: str) -> None:
    if isinstance(chosen, list) != isinstance(rejected, list):
        raise InputError(
            "one of chosen and rejected is text and the other is messages",
            where=place,
            fix="Write both the same way.",
        )


def _parted(chosen: Any, rejected: Any, cut: int, place: str) -> dict[str, Any]:
    if not cut or cut in (len(chosen), len(rejected)):
        what = (
            "have no beginning in common, so there is no prompt"
            if not cut
            else "are the same, or one is the beginning of the other"
        )
        raise InputError(
            f"chosen and rejected {what}",
            where=place,
            fix="Repair or remove the row, or give a prompt column.",
        )
    return {"prompt": chosen[:cut], "chosen": chosen[cut:], "rejected": rejected[cut:]}


def _asks(messages: list[Any]) -> bool:
    if not messages or not isinstance(messages[0], Mapping):
        return False
    turn = messages[0]
    return turn.get("role") != "assistant" and turn.get("from") not in ("gpt", "assistant")


def _shared(a: Any, b: Any) -> int:
    """How many messages or characters both begin with."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))))


def _shared_text(a: str, b: str) -> int:
    """How many characters both begin with, up to the end of a whole word: the blank before the
    first word that differs is the answer's.

    >>> _shared_text("Q: 2+2? A: four", "Q: 2+2? A: five")
    10
    """
    n = _shared(a, b)
    while n and not a[n - 1].isspace():
        n -= 1
    return len(a[:n].rstrip())


# HH


def is_hh(record: Record) -> bool:
    """Both sides are dialogues written as text, `Human: ...` and `Assistant: ...`."""
    return is_text_pair(record) and all(
        isinstance(record[side], str) and _is_dialogue(record[side])
        for side in ("chosen", "rejected")
    )


def hh(record: Record, place: str) -> dict[str, Any]:
    return conversation_pair(
        {side: dialogue(record[side], place, side) for side in ("chosen", "rejected")}, place
    )


def dialogue(value: str, place: str, name: str) -> list[Message]:
    """The messages of a dialogue that is written as text.

    >>> dialogue("\\n\\nHuman: 2+2?\\n\\nAssistant: 4", "row 0", "chosen")
    [{'role': 'user', 'content': '2+2?'}, {'role': 'assistant', 'content': '4'}]
    """
    if not _is_dialogue(value):
        raise InputError(
            f"{name} is no dialogue of Human: and Assistant: turns",
            where=place,
            fix="Repair or remove the row, or read it as it is: data.format: text_pairs.",
        )
    _, *parts = SPEAKER.split(value)
    return [
        {"role": ROLES[speaker], "content": said.strip()}
        for speaker, said in zip(parts[::2], parts[1::2], strict=True)
    ]


def _is_dialogue(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    begin = SPEAKER.match(value.lstrip())
    return begin is not None and begin.group(1) == "Human" and "\n\nAssistant:" in value


# OpenAI


def is_openai_pair(record: Record) -> bool:
    asked = record.get("input")
    return isinstance(asked, Mapping) and isinstance(asked.get("messages"), list)


def openai_question(record: Record, place: str) -> dict[str, Any]:
    asked = record["input"]
    tools = {"tools": asked["tools"]} if asked.get("tools") else {}
    return {"prompt": asked["messages"], **tools}


def openai_answers(record: Record, place: str) -> dict[str, Any]:
    return {"chosen": record["preferred_output"], "rejected": record["non_preferred_output"]}
