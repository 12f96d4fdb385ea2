"""Columns of rows as JSON and back, unchanged: JSON has no tuples and no keys but strings, and a
scorer may care. No torch here.
"""

from __future__ import annotations

import base64
import datetime
from collections.abc import Callable
from decimal import Decimal
from typing import Any

MARK = "\x00"  # {MARK: kind, "": value}
_TEXT: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "bytes": (bytes, lambda v: base64.b64encode(v).decode(), base64.b64decode),
    "decimal": (Decimal, str, Decimal),
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
}


class NotPlainData(TypeError):
    """Something that is data for nobody but this process."""


def encode(value: Any) -> Any:
    """
    >>> decode(encode({1: (2, "x")})), encode([1, {"a": None}])
    ({1: (2, 'x')}, [1, {'a': None}])
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if type(value) is list:
        return [encode(v) for v in value]
    if isinstance(value, dict):
        if all(type(k) is str for k in value) and MARK not in value:
            return {k: encode(v) for k, v in value.items()}
        return {MARK: "dict", "": [[encode(k), encode(v)] for k, v in value.items()]}
    if isinstance(value, list | tuple | set | frozenset):
        kind = (
            "tuple"
            if isinstance(value, tuple)
            else "set"
            if isinstance(value, set | frozenset)
            else "list"
        )
        return {MARK: kind, "": [encode(v) for v in value]}
    for name, (cls, there, _) in _TEXT.items():
        if isinstance(value, cls):
            return {MARK: name, "": there(value)}
    if isinstance(value, str | int | float):  # of a class of its own, such as an enum
        return encode(next(kind(value) for kind in (str, int, float) if isinstance(value, kind)))
    raise NotPlainData(type(value).__name__)


def decode(value: Any) -> Any:
    if isinstance(value, list):
        return [decode(v) for v in value]
    if not isinstance(value, dict):
        return value
    if MARK not in value:
        return {k: decode(v) for k, v in value.items()}
    kind = value[MARK]
    inner = value[""]
    if kind == "dict":
        return {decode(k): decode(v) for k, v in inner}
    if kind in _TEXT:
        return _TEXT[kind][2](inner)
    return {"tuple": tuple, "set": set, "list": list}[kind](decode(v) for v in inner)
