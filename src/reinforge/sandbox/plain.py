"""Plain values as lines of JSON, in and out of a contained program.

Used on both sides, so: the standard library only.

What arrives outside is built here from None, bool, int, float, complex, str, bytes, list, tuple,
dict, set; nothing that the program defined crosses, in particular no `__eq__`. Anything else
becomes `Opaque`, which equals nothing.
"""

from __future__ import annotations

import itertools
import json
import math
from types import GeneratorType
from typing import Any

DEEPEST = 100
LARGEST = 1 << 20  # characters of one line
ITEMS = 100_000  # taken from an iterator
KEYS = 100_000  # of one dict or set
# how many of them may have one hash: whoever makes all collide lets us pay their number squared
SAME_HASH = 100
ITERATORS: Any = (
    range,
    map,
    filter,
    zip,
    enumerate,
    reversed,
    GeneratorType,
    *map(type, (iter([]), {}.keys(), {}.values(), {}.items())),
)


class Opaque:
    """Stands for a value that is not plain."""

    def __init__(self, kind: str):
        self.kind = kind

    def __repr__(self) -> str:
        return f"<{self.kind}>"


def encode(value: Any, depth: int = 0) -> Any:
    """As what JSON can say; types that it lacks are {"t": type, "v": content}."""
    if depth > DEEPEST:
        raise ValueError(f"nested more than {DEEPEST} deep")
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int.__add__(value, 0)
        return number if number.bit_length() < 10_000 else {"t": "int", "v": hex(number)}
    if isinstance(value, float):
        real = float.__add__(value, 0.0)
        return real if math.isfinite(real) else {"t": "float", "v": repr(real)}
    if isinstance(value, complex):
        return {"t": "complex", "v": [repr(value.real), repr(value.imag)]}
    if isinstance(value, (bytes, bytearray)):
        return {"t": "bytes", "v": bytes(value).hex()}
    if isinstance(value, list):
        return [encode(item, depth + 1) for item in list.__iter__(value)]
    if isinstance(value, tuple):
        return {"t": "tuple", "v": [encode(item, depth + 1) for item in tuple.__iter__(value)]}
    if isinstance(value, (dict, set, frozenset)) and len(value) > KEYS:
        return {"t": "opaque", "v": f"{type(value).__name__[:60]} of more than {KEYS}"}
    if isinstance(value, dict):
        return {
            "t": "dict",
            "v": [[encode(k, depth + 1), encode(v, depth + 1)] for k, v in dict.items(value)],
        }
    if isinstance(value, (set, frozenset)):
        return {"t": "set", "v": [encode(item, depth + 1) for item in value]}
    if isinstance(value, ITERATORS):
        return {
            "t": "iterator",
            "v": [encode(item, depth + 1) for item in itertools.islice(value, ITEMS)],
        }
    if callable(getattr(type(value), "tolist", None)):  # numpy arrays and scalars
        return encode(value.tolist(), depth + 1)
    return {"t": "opaque", "v": type(value).__name__[:80]}


def decode(said: Any, depth: int = 0) -> Any:
    """The reverse. ValueError for anything that `encode` would not have said."""
    if depth > 2 * DEEPEST:
        raise ValueError("nested too deep")
    if isinstance(said, list):
        return [decode(item, depth + 1) for item in said]
    if not isinstance(said, dict):
        return said
    if said.keys() != {"t", "v"}:
        raise ValueError("no value")
    kind = said["t"]
    content = said["v"]
    if kind in ("int", "float", "bytes", "opaque"):
        if not isinstance(content, str):
            raise ValueError("no value")
        return {
            "int": lambda: int(content, 16),
            "float": lambda: float(content),
            "bytes": lambda: bytes.fromhex(content),
            "opaque": lambda: Opaque(content[:80]),
        }[kind]()
    if not isinstance(content, list) or (kind in ("dict", "set") and len(content) > KEYS):
        raise ValueError("no value")
    try:
        if kind == "complex":
            real, imaginary = content
            if not isinstance(real, str) or not isinstance(imaginary, str):
                raise ValueError("no value")
            return complex(float(real), float(imaginary))
        if kind == "dict":
            pairs = [(decode(k, depth + 1), decode(v, depth + 1)) for k, v in content]
            spread([k for k, _ in pairs])
            return dict(pairs)
        items = [decode(item, depth + 1) for item in content]
        if kind == "set":
            spread(items)
            return set(items)
        if kind == "tuple":
            return tuple(items)
        if kind == "iterator":
            return iter(items)
    except (TypeError, IndexError, OverflowError) as error:  # unhashable, too few
        raise ValueError(str(error)) from error
    raise ValueError(f"no such type {str(kind)[:40]!r}")


def spread(keys: list[Any]) -> None:
    """ValueError if too many have the same hash."""
    hashes = sorted(map(hash, keys))
    if any(a == b for a, b in zip(hashes, hashes[SAME_HASH:], strict=False)):
        raise ValueError("keys that collide")


def dumps(message: dict[str, Any]) -> bytes:
    text = json.dumps(message, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    if len(text) > LARGEST:
        raise ValueError(f"more than {LARGEST} characters")
    return text.encode()


def loads(line: bytes) -> dict[str, Any]:
    """ValueError for anything but a JSON object of bearable size and depth."""
    if len(line) > LARGEST:
        raise ValueError("too long")
    try:
        message = json.loads(line)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    if not isinstance(message, dict):
        raise ValueError("no object")
    return message
