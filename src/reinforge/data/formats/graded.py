"""Answers with a grade for each of several attributes: HelpSteer and HelpSteer2."""

from __future__ import annotations

import re
from typing import Any

from reinforge.data.formats.columns import Record

ATTRIBUTES = ("helpfulness", "correctness", "coherence", "complexity", "verbosity")
# how HelpSteer2 writes a conversation as one text: what stands before every turn but the first
TURN = re.compile(r"\s*<extra_id_1>(User|Assistant)\n")


def is_graded(record: Record) -> bool:
    value = record.get("helpfulness")
    return isinstance(value, int | float) and not isinstance(value, bool)


def conversation(record: Record, place: str) -> dict[str, Any]:
    """A prompt of several turns as messages; others as they are."""
    prompt = record["prompt"]
    if not isinstance(prompt, str):
        return {}
    first, *rest = TURN.split(prompt)
    if not rest or rest[-2] != "User":
        return {}
    turns = [
        {"role": role.lower(), "content": said}
        for role, said in zip(rest[::2], rest[1::2], strict=True)
    ]
    return {"prompt": [{"role": "user", "content": first}, *turns]}
