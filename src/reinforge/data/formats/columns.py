"""What all formats share: looking for columns, and texts that must be texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reinforge.core.errors import InputError

Record = Mapping[str, Any]
Message = dict[str, Any]

OWN_PROMPTS = ("prompt", "question")
REPAIR = (
    "Repair or remove the row, or say what the prompt is: data.columns: {prompt: <their name>}, or"
    " data.template."
)


def has(record: Record, *names: str) -> bool:
    """Whether one of the columns is there and not null."""
    return first(record, names) is not None


def first(record: Record, names: Sequence[str]) -> str | None:
    """The first of the columns that is there and not null."""
    return next((name for name in names if record.get(name) is not None), None)


def text(record: Record, name: str | None, place: str) -> str:
    """A column that must be text; "" where it is missing."""
    value = record.get(name) if name is not None else None
    if value is not None and not isinstance(value, str):
        raise InputError(f"{name} is {type(value).__name__}, not text", where=place, fix=REPAIR)
    return value or ""


def system_turn(record: Record, names: Sequence[str], place: str) -> list[Message]:
    """A row's own system prompt, as the first message."""
    found = text(record, first(record, names), place)
    return [{"role": "system", "content": found}] if found else []


def completion(record: Record, *names: str) -> dict[str, Any]:
    """The answer under our name, unless the row has that already."""
    name = first(record, names)
    return {} if name is None or has(record, "completion") else {"completion": record[name]}


def label(record: Record) -> dict[str, Any]:
    """LLaMA-Factory's name for the verdict of a single answer."""
    tagged = has(record, "kto_tag") and not has(record, "label")
    return {"label": record["kto_tag"]} if tagged else {}
