"""What the adapters share."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import Any

from reinforge.core.env import Message, Observation
from reinforge.core.errors import InputError
from reinforge.core.row import Row


def library(module: str, package: str) -> Any:
    """The module of an optional package, or an error that says how to get it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != module.split(".")[0]:
            raise
        raise InputError(
            f"the package {package} is not installed.",
            where="env.name",
            fix=f"pip install {package}, or set env.python to an interpreter that has it.",
        ) from error


def first(row: Row, text: str) -> Observation:
    """The environment's first words. Of the row's own prompt only system messages are kept."""
    system = (
        [] if isinstance(row.prompt, str) else [m for m in row.prompt if m.get("role") == "system"]
    )
    return Observation([*system, said(text)])


def said(text: str) -> Message:
    return {"role": "user", "content": text}


def row_messages(row: Row) -> list[Message]:
    return [said(row.prompt)] if isinstance(row.prompt, str) else [dict(m) for m in row.prompt]


def numbers(found: Mapping[str, Any] | None) -> dict[str, float]:
    """Those values of a dictionary that can be metrics."""
    return {
        str(k): float(v)
        for k, v in (found or {}).items()
        if isinstance(v, int | float) and math.isfinite(v)
    }


def number(value: Any, what: str) -> float:
    """A reward as a float; whatever else a library gave is an episode that cannot be scored."""
    if hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{what} is {value!r}, not a number")
    return float(value)
