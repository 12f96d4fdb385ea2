"""Reading what a run wrote about itself.

Nothing is trusted to be complete: a run may be writing it now, or was killed while it did.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or nothing where there is none or it is cut."""
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file; a last line that is still being written is left out."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                yield value


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """{"train": {"steps": 3}} as {"train.steps": 3}; lists of sections count from 0:
    rewards.0.name.
    """
    items = (
        value.items()
        if isinstance(value, Mapping)
        else enumerate(value)
        if _sections(value)
        else None
    )
    if items is None or not value:
        return {prefix: value} if prefix else {}
    return {
        k: v
        for key, item in items
        for k, v in flatten(item, f"{prefix}.{key}" if prefix else str(key)).items()
    }


def _sections(value: Any) -> bool:
    return (
        isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)
    )
