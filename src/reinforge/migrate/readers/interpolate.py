"""Values that name other values, as OmegaConf writes them: `${a.b}`, `${.a}`, `${mul:${a}, 2}`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from reinforge.migrate.readers.values import value_of

INNER = re.compile(r"\$\{([^${}]*)\}")
MAX_ROUNDS = 20
MAX_TEXT = 20_000  # characters: values may double one another


def interpolated(data: Mapping[str, Any]) -> dict[str, Any]:
    """The same tree with every `${...}` in it replaced that can be."""
    found = _walk(data, data, ())
    assert isinstance(found, dict)
    return found


def _walk(value: Any, root: Mapping[str, Any], at: tuple[str, ...]) -> Any:
    if isinstance(value, Mapping):
        return {key: _walk(inner, root, (*at, str(key))) for key, inner in value.items()}
    if isinstance(value, list):
        return [_walk(inner, root, (*at, str(i))) for i, inner in enumerate(value)]
    return _resolved(value, root, at) if isinstance(value, str) and "${" in value else value


def _resolved(text: str, root: Mapping[str, Any], at: tuple[str, ...]) -> Any:
    for _ in range(MAX_ROUNDS):
        match = INNER.search(text)
        if match is None:
            return value_of(text)
        value = _value(match.group(1).strip(), root, at)
        if value is None or isinstance(value, Mapping | list):
            return value if match.group() == text.strip() else text
        text = text[: match.start()] + str(value) + text[match.end() :]
        if len(text) > MAX_TEXT:
            return text[:MAX_TEXT]
    return text


def _value(inner: str, root: Mapping[str, Any], at: tuple[str, ...]) -> Any:
    kind, colon, rest = inner.partition(":")
    if not colon:
        return _at(inner, root, at)
    arguments = [part.strip() for part in rest.split(",")]
    if kind == "oc.select":
        found = _at(arguments[0], root, at)
        return found if found is not None else (arguments[1] if len(arguments) > 1 else None)
    numbers = [value_of(part) for part in arguments]
    if not all(isinstance(number, int | float) for number in numbers) or len(numbers) != 2:
        return None
    first, second = numbers
    if kind == "mul":
        return first * second
    if kind in ("div", "divide") and second:
        return first / second
    return {"add": first + second, "sub": first - second, "max": max(numbers)}.get(kind)


def _at(path: str, root: Mapping[str, Any], at: tuple[str, ...]) -> Any:
    """A key from the top, or with points in front from where the value stands."""
    plain = path.lstrip(".")
    up = len(path) - len(plain)
    here: Any = root
    for part in [*(at[:-up] if up else ()), *plain.split(".")]:
        here = here.get(part) if isinstance(here, Mapping) else None
    return here
