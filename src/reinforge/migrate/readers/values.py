"""What a value means that another library would have read: of YAML 1.1, Hydra, or argparse."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from reinforge.config.strict import parse, scalar
from reinforge.core.errors import InputError

SPELLED = {"None": None, "none": None}


def value_of(text: Any) -> Any:
    """A scalar, or a flow list or mapping, that was written as text.

    >>> value_of("1e-6"), value_of("['a', 'b']"), value_of("None"), value_of("{rate: 1}")
    (1e-06, ['a', 'b'], None, {'rate': 1})
    """
    if not isinstance(text, str):
        return text
    stripped = text.strip()
    if stripped in SPELLED:
        return SPELLED[stripped]
    try:
        if stripped[:1] in ("[", "{") and not stripped.startswith("{{"):
            return parse(stripped, "value")[0]
        return scalar(stripped, where="value")
    except InputError:
        return text


def flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted keys; lists and empty sections are values."""
    found: dict[str, Any] = {}
    for key, value in data.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{name}.")
        else:
            found[name] = value_of(value)
    return found


def overrides(words: Sequence[str]) -> dict[str, Any]:
    """Hydra's `key=value`, `+key=value`, `++key=value`."""
    found = {}
    for word in words:
        match = re.fullmatch(r"\+{0,2}~?([\w.@/-]+)=(.*)", word, re.DOTALL)
        if match is not None and not word.startswith("--"):
            found[match.group(1)] = value_of(match.group(2))
    return found


def flags(words: Sequence[str]) -> dict[str, Any]:
    """argparse's `--flag`, `--flag value`, `--flag=value`, `--flag one two`."""
    found: dict[str, Any] = {}
    name = None
    for word in words:
        if re.match(r"--[A-Za-z]", word):
            name, equals, value = word[2:].partition("=")
            found[name] = [value_of(value)] if equals else []
        elif name is not None:
            found[name].append(value_of(word.rstrip(",")))
    return {
        key: True if not values else values[0] if len(values) == 1 else values
        for key, values in found.items()
    }
