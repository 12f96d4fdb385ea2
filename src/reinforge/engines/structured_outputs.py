"""A constraint in vLLM's words, `structured_outputs`, which our own server reads too."""

from __future__ import annotations

import json
from typing import Any

from reinforge.core.constraint import Constraint


def server_words(constraint: Constraint) -> dict[str, Any]:
    """
    >>> server_words(Constraint("regex", "yes|no"))
    {'regex': 'yes|no'}
    """
    match constraint.kind:
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            return {"json": json.loads(constraint.text)}
    return {constraint.kind: constraint.text}
