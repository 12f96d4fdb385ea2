"""Conversations whose turns have other names than role and content: ShareGPT's and Capybara's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from reinforge.core.errors import InputError
from reinforge.data.formats.columns import (
    OWN_PROMPTS,
    Message,
    Record,
    first,
    has,
    label,
    system_turn,
)

TALKS = ("conversations", "conversation")
SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
    "function_response": "tool",
}


def talk(record: Record) -> str | None:
    """The column with a conversation in it, unless the row has a prompt of its own.

    `messages` is one only where its turns are of the {from, value} kind.
    """
    if has(record, *OWN_PROMPTS):
        return None
    if has(record, "messages"):
        turns = record["messages"]
        foreign = isinstance(turns, list) and any(
            isinstance(turn, Mapping) and "from" in turn for turn in turns
        )
        return "messages" if foreign else None
    if has(record, "text"):
        return None
    name = first(record, TALKS)
    return name if name is not None and isinstance(record[name], list) else None


def is_sharegpt(record: Record) -> bool:
    return talk(record) is not None


def is_capybara(record: Record) -> bool:
    """Turns that are an input and an output each."""
    name = talk(record)
    turns = record[name] if name is not None else []
    return bool(turns) and all(
        isinstance(turn, Mapping) and "input" in turn and "output" in turn for turn in turns
    )


def sharegpt(record: Record, place: str) -> dict[str, Any]:
    return {"messages": _conversation(record, place)}


def sharegpt_question(record: Record, place: str) -> dict[str, Any]:
    """The conversation is what is asked: its answers stand elsewhere."""
    messages = _conversation(record, place)
    return {"prompt": messages, **_same_column(record, messages)}


def sharegpt_judged(record: Record, place: str) -> dict[str, Any]:
    """The last turn is what is judged."""
    messages = _conversation(record, place)
    if len(messages) < 2:
        return {"messages": messages, **label(record)}
    answered = {"prompt": messages[:-1], "completion": messages[-1:], **label(record)}
    return {**answered, **_same_column(record, messages)}


def _same_column(record: Record, messages: list[Any]) -> dict[str, Any]:
    """`messages` with our roles, where the conversation stands in that column."""
    return {"messages": messages} if talk(record) == "messages" else {}


def sides(record: Record, place: str) -> dict[str, Any]:
    """`chosen` and `rejected` that are one turn, or several."""
    return {
        side: roles([value] if isinstance(value, Mapping) else value, place, side)
        for side in ("chosen", "rejected")
        if isinstance(value := record.get(side), list | Mapping)
    }


def capybara(record: Record, place: str) -> dict[str, Any]:
    name = talk(record) or first(record, TALKS)
    turns = [] if name is None else record[name]
    messages = [
        {"role": role, "content": turn.get(key)}
        for turn in turns
        if isinstance(turn, Mapping)
        for role, key in (("user", "input"), ("assistant", "output"))
    ]
    return {"messages": [*system_turn(record, ("system",), place), *messages]}


def _conversation(record: Record, place: str) -> list[Any]:
    name = talk(record) or first(record, (*TALKS, "messages"))
    if name is None or not isinstance(record[name], list):
        raise InputError(f"{name} is not a list of turns", where=place)
    messages = roles(record[name], place, name)
    begins = messages and isinstance(messages[0], Mapping) and messages[0].get("role") == "system"
    return messages if begins else [*system_turn(record, ("system",), place), *messages]


def roles(turns: list[Any], place: str, name: str) -> list[Any]:
    """{from, value} as {role, content}; what is no such turn is left for the check of messages."""
    return [
        _turn(turn, place, f"{name}[{i}]") if isinstance(turn, Mapping) else turn
        for i, turn in enumerate(turns)
    ]


def _turn(turn: Mapping[str, Any], place: str, where: str) -> Message:
    if "from" not in turn:
        return dict(turn)
    speaker = turn["from"]
    role = SPEAKERS.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise InputError(
            f"{where} is from {speaker!r}", where=place, fix=f"Speakers are: {', '.join(SPEAKERS)}."
        )
    weight = {"weight": turn["weight"]} if turn.get("weight") is not None else {}
    if speaker == "function_call":
        calls = _calls(turn.get("value"), place, where)
        return {"role": role, "content": None, "tool_calls": calls, **weight}
    return {"role": role, "content": turn.get("value"), **weight}


def _calls(value: Any, place: str, where: str) -> list[dict[str, Any]]:
    """The JSON text of a call {name, arguments}, or of a list of them."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        found = None
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(
        isinstance(call, Mapping) and isinstance(call.get("name"), str) for call in calls
    ):
        raise InputError(
            f"{where} is a function_call whose value is no JSON of name and arguments",
            where=place,
            fix="Repair or remove the row.",
        )
    return [
        {"type": "function", "function": {"name": c["name"], "arguments": c.get("arguments", {})}}
        for c in calls
    ]
