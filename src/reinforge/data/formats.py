"""Rows in the shapes that many data sets have, read as they are: Alpaca's and ShareGPT's.

| shape | columns | becomes |
|---|---|---|
| Alpaca | instruction, input, output, system, history | prompt, completion |
| Dolly | instruction, context, response, system, history | prompt, completion |
| Alpaca, compared | instruction, input, chosen, rejected | prompt |
| ShareGPT | conversations: [{from, value}], system | messages |
| ShareGPT, compared | conversations; chosen, rejected: {from, value} | prompt, chosen, rejected |

The columns themselves stay, for data.template and for the rewards. A row whose prompt comes from
elsewhere (data.template, a prompt column of its own) is not refused for what stands in these
columns. No torch here.
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
OWN = (*OURS, "text")  # nor, if it has one of these, is its prompt looked for in `conversations`
REPAIR = (
    "Repair or remove the row, or say what the prompt is: data.columns: {prompt: <their name>}, or"
    " data.template."
)
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


def understood(record: dict[str, Any], place: str, *, templated: bool = False) -> dict[str, Any]:
    """The record with our columns beside its own, where it has one of the shapes; else as it is.

    `templated`: its prompt is made by data.template.
    """
    return _alpaca(_sharegpt(record, place, templated), place, templated)


# Alpaca


def _alpaca(record: dict[str, Any], place: str, templated: bool) -> dict[str, Any]:
    asked = _first(record, ASKS)
    if asked is None or any(record.get(name) is not None for name in OURS):
        return record
    found: dict[str, Any] = _label(record)
    if not templated:
        try:
            found["prompt"] = _question(record, asked, place)
        except InputError:
            if record.get("text") is None:
                raise
            return record  # no Alpaca row, but a text with columns of these names
    answer = _first(record, OUTPUTS)
    if answer is not None and record.get("completion") is None:
        found["completion"] = record[answer]
    return {**record, **found}


def _question(record: Mapping[str, Any], asked: str, place: str) -> str | list[dict[str, Any]]:
    """The instruction and, on the next line, its input, as LLaMA-Factory joins them; after the
    system prompt and the earlier turns, if there are any.
    """
    parts = [
        part
        for part in (_line(record, asked, place), _line(record, _first(record, INPUTS), place))
        if part
    ]
    if not parts:
        raise InputError(f"{asked} is empty, and so is its input", where=place, fix=REPAIR)
    before = [*_system(record, place), *_history(record, place)]
    text = "\n".join(parts)
    return [*before, {"role": "user", "content": text}] if before else text


def _line(record: Mapping[str, Any], name: str | None, place: str) -> str:
    value = record.get(name) if name is not None else None
    if value is not None and not isinstance(value, str):
        raise InputError(f"{name} is {type(value).__name__}, not text", where=place, fix=REPAIR)
    return value or ""


def _history(record: Mapping[str, Any], place: str) -> list[dict[str, Any]]:
    """Earlier turns: pairs of what was asked and what was answered."""
    turns = record.get("history") or []
    if not isinstance(turns, list) or not all(
        isinstance(t, list | tuple) and len(t) == 2 for t in turns
    ):
        raise InputError(
            "history is not a list of pairs [asked, answered]", where=place, fix=REPAIR
        )
    return [
        {"role": role, "content": text}
        for pair in turns
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def check_nothing_lost(record: Mapping[str, Any], columns: Mapping[str, str], place: str) -> None:
    """Refuses a mapping that takes half of an Alpaca row for the prompt and leaves the other half,
    a text that is not empty, out.
    """
    taken = columns.get("prompt")
    if taken not in (*ASKS, *INPUTS):
        return
    halves = INPUTS if taken in ASKS else ASKS
    texts = [name for name in halves if isinstance(record.get(name), str) and record[name].strip()]
    left = [name for name in texts if name not in columns.values()]
    if left and _first(record, ASKS) is not None:
        raise InputError(
            f"data.columns takes the prompt from {taken}, and {left[0]} would be left out",
            where=place,
            fix=(
                "Remove prompt and completion from data.columns: these columns are read as they"
                f" are. To leave it out all the same, set data.template: '{{{taken}}}'."
            ),
        )


# ShareGPT


def _sharegpt(record: dict[str, Any], place: str, templated: bool) -> dict[str, Any]:
    sides = {
        side: _turns([value] if isinstance(value, Mapping) else value, place, side)
        for side in ("chosen", "rejected")
        if isinstance(value := record.get(side), list | Mapping)
    }
    record = {**record, **sides}
    own = templated or any(record.get(name) is not None for name in OWN)
    name = (
        "messages" if record.get("messages") is not None else None if own else _first(record, TALKS)
    )
    if name is None or not isinstance(record[name], list):
        return record
    if name == "messages" and not any(
        isinstance(turn, Mapping) and "from" in turn for turn in record[name]
    ):
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
    return [
        _turn(turn, place, f"{name}[{i}]") if isinstance(turn, Mapping) else turn
        for i, turn in enumerate(turns)
    ]


def _turn(turn: Mapping[str, Any], place: str, where: str) -> dict[str, Any]:
    if "from" not in turn:
        return dict(turn)
    speaker = turn["from"]
    role = SPEAKERS.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise InputError(
            f"{where} is from {speaker!r}", where=place, fix=f"Speakers are: {', '.join(SPEAKERS)}."
        )
    if speaker == "function_call":
        return {
            "role": role,
            "content": None,
            "tool_calls": _calls(turn.get("value"), place, where),
        }
    return {"role": role, "content": turn.get("value")}


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
