"""Rows in the shapes that many data sets have, read as they are: Alpaca's and ShareGPT's.

| shape | columns | becomes |
|---|---|---|
| Alpaca | instruction, input, output (Dolly: context, response), system, history | prompt, completion |
| Alpaca, compared | instruction, input, chosen, rejected | prompt |
| ShareGPT | conversations: [{from, value}], system | messages |
| ShareGPT, compared | conversations, chosen: {from, value}, rejected: {from, value} | prompt, chosen, rejected |

The columns themselves stay, for data.template and for the rewards. No torch here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from reinforge.core.errors import InputError

ASKS = ("instruction",)
INPUTS = ("input", "context")  # what the instruction is about, often empty
OUTPUTS = ("output", "response")
TALKS = ("conversations", "conversation")
OURS = ("prompt", "question", "messages")  # a row that has one of these is no Alpaca row
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


def understood(record: dict[str, Any], place: str) -> dict[str, Any]:
    """The record with our columns beside its own, where it has one of the shapes; else as it is."""
    return _alpaca(_sharegpt(record, place), place)


# Alpaca


def _alpaca(record: dict[str, Any], place: str) -> dict[str, Any]:
    """The instruction and, on the next line, its input, as LLaMA-Factory joins them."""
    asked = _first(record, ASKS)
    if asked is None or any(record.get(name) is not None for name in OURS):
        return record
    parts = [part for part in (_line(record, asked, place), _line(record, _first(record, INPUTS), place)) if part]
    if not parts:
        raise InputError(f"{asked} is empty, and so is its input", where=place, fix="Repair or remove the row.")
    before = [*_system(record, place), *_history(record, place)]
    text = "\n".join(parts)
    found: dict[str, Any] = {"prompt": [*before, {"role": "user", "content": text}] if before else text}
    answer = _first(record, OUTPUTS)
    if answer is not None and record.get("completion") is None:
        found["completion"] = record[answer]
    return {**record, **found, **_label(record)}


def _line(record: Mapping[str, Any], name: str | None, place: str) -> str:
    value = record.get(name) if name is not None else None
    if value is not None and not isinstance(value, str):
        raise InputError(f"{name} is {type(value).__name__}, not text", where=place, fix="Repair or remove the row.")
    return value or ""


def _history(record: Mapping[str, Any], place: str) -> list[dict[str, Any]]:
    """Earlier turns: pairs of what was asked and what was answered."""
    turns = record.get("history") or []
    if not isinstance(turns, list) or not all(isinstance(t, list | tuple) and len(t) == 2 for t in turns):
        raise InputError("history is not a list of pairs [asked, answered]", where=place, fix="Repair or remove the row.")
    return [{"role": role, "content": text} for pair in turns for role, text in zip(("user", "assistant"), pair, strict=True)]


def check_nothing_lost(record: Mapping[str, Any], columns: Mapping[str, str], place: str) -> None:
    """Refuses a mapping that takes half of an Alpaca row for the prompt and leaves the other half, which is not empty, out."""
    taken = columns.get("prompt")
    if taken not in (*ASKS, *INPUTS):
        return
    halves = INPUTS if taken in ASKS else ASKS
    left = [name for name in halves if name not in columns.values() and str(record.get(name) or "").strip()]
    if left and _first(record, ASKS) is not None:
        raise InputError(
            f"data.columns takes the prompt from {taken}, and {left[0]} would be left out",
            where=place,
            fix="Remove prompt and completion from data.columns: these columns are read as they are. To leave it out all the "
            f"same, set data.template: '{{{taken}}}'.",
        )


# ShareGPT


def _sharegpt(record: dict[str, Any], place: str) -> dict[str, Any]:
    sides = {
        side: _turns([value] if isinstance(value, Mapping) else value, place, side)
        for side in ("chosen", "rejected")
        if isinstance(value := record.get(side), list | Mapping)
    }
    record = {**record, **sides}
    name = "messages" if record.get("messages") is not None else _first(record, TALKS)
    if name is None or not isinstance(record[name], list):
        return record
    if name == "messages" and not any(isinstance(turn, Mapping) and "from" in turn for turn in record[name]):
        return record
    messages = _turns(record[name], place, name)
    if messages and isinstance(messages[0], Mapping) and messages[0].get("role") != "system":
        messages = [*_system(record, place), *messages]
    answered = record.get("chosen") is not None and record.get("rejected") is not None
    if record.get("prompt") is None and answered:
        return {**record, "prompt": messages}
    if record.get("prompt") is None and record.get("kto_tag") is not None and len(messages) > 1:
        return {**record, "prompt": messages[:-1], "completion": messages[-1:], **_label(record)}
    return {**record, "messages": messages}


def _turns(turns: list[Any], place: str, name: str) -> list[Any]:
    """{from, value} as {role, content}; what is no such turn is left for the check of messages."""
    return [_turn(turn, place, f"{name}[{i}]") if isinstance(turn, Mapping) else turn for i, turn in enumerate(turns)]


def _turn(turn: Mapping[str, Any], place: str, where: str) -> dict[str, Any]:
    if "from" not in turn:
        return dict(turn)
    speaker = turn["from"]
    role = SPEAKERS.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise InputError(f"{where} is from {speaker!r}", where=place, fix=f"Speakers are: {', '.join(SPEAKERS)}.")
    if speaker == "function_call":
        return {"role": role, "content": None, "tool_calls": _calls(turn.get("value"), place, where)}
    return {"role": role, "content": turn.get("value")}


def _calls(value: Any, place: str, where: str) -> list[dict[str, Any]]:
    """The JSON text of a call {name, arguments}, or of a list of them."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        found = None
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, Mapping) and isinstance(call.get("name"), str) for call in calls):
        raise InputError(
            f"{where} is a function_call whose value is no JSON of name and arguments",
            where=place,
            fix="Repair or remove the row.",
        )
    return [{"type": "function", "function": {"name": c["name"], "arguments": c.get("arguments", {})}} for c in calls]


# both


def _first(record: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if record.get(name) is not None), None)


def _system(record: Mapping[str, Any], place: str) -> list[dict[str, Any]]:
    """A row's own system prompt."""
    text = _line(record, "system", place)
    return [{"role": "system", "content": text}] if text else []


def _label(record: Mapping[str, Any]) -> dict[str, Any]:
    """LLaMA-Factory's name for the verdict of a single answer."""
    tagged = record.get("kto_tag") is not None and record.get("label") is None
    return {"label": record["kto_tag"]} if tagged else {}
