"""A reward with a signal in nearly every group, in a module of its own: the processes that compute
it import nothing else.
"""

from __future__ import annotations

from typing import Any


def odd(completions: list[str], **_: Any) -> list[float]:
    """The share of odd characters."""
    return [sum(ord(ch) % 2 for ch in c) / max(1, len(c)) for c in completions]


def odd_length(completions: list[str], **_: Any) -> list[float]:
    """1 for an odd number of characters, otherwise 0."""
    return [float(len(c) % 2) for c in completions]


def even_length(completions: list[str], **_: Any) -> list[float]:
    """2 for an even number of characters, otherwise 0."""
    return [2.0 - 2.0 * (len(c) % 2) for c in completions]
