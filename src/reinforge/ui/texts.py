"""Text that any page can be given."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def sound(value: Any) -> Any:
    """The same value without what no answer can carry: lone surrogates are shown by their code,
    numbers that are not finite are None.

    >>> sound({"a": ["x", "\\ud800"]})
    {'a': ['x', '\\\\ud800']}
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return value.encode("utf-8", "backslashreplace").decode()
        return value
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {sound(k): sound(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [sound(v) for v in value]
    return value
