"""Text from models and data, made safe to look at: nothing in it acts on a terminal or a page."""

from __future__ import annotations

import unicodedata


def visible(text: str, limit: int | None = None) -> str:
    """Text safe for a terminal: newlines as ⏎, other control, format and surrogate characters as
    \\x1b, \\u202e, ...

    >>> visible("a\\n\\x1b[2Jb")
    'a⏎\\\\x1b[2Jb'
    """
    cut = text if limit is None or len(text) <= limit else text[: limit - 1] + "…"
    return "".join(_visible(c) for c in cut)


def _visible(char: str) -> str:
    if char == "\n":
        return "⏎"
    if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        code = ord(char)
        return (
            f"\\x{code:02x}"
            if code < 0x100
            else f"\\u{code:04x}"
            if code < 0x10000
            else f"\\U{code:08x}"
        )
    return char
