"""Rewards of whole runs, in a module that imports nothing: the processes that compute a reward
import the module where it stands, and with a file of tests that would be torch and everything else.
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


def share_of_a(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
    """The share of `a` and `A`."""
    return [sum(ch in "aA" for ch in c) / max(1, len(c)) for c in completions]


def digits(completions: list[str], **_: Any) -> list[float]:
    """A quarter for every digit."""
    return [sum(ch.isdigit() for ch in c) / 4 for c in completions]


def short(completions: list[str], **_: Any) -> list[float]:
    """An eighth less for every character."""
    return [1 - len(c) / 8 for c in completions]


def minus_length(completions: list[str], **_: Any) -> list[float]:
    """One less for every character."""
    return [-float(len(c)) for c in completions]


def polite(completions: list[str], **_: Any) -> list[float]:
    return [float(c == "please") for c in completions]


def ones(completions: list[str]) -> list[float]:
    return [1.0] * len(completions)


def halves(completions: list[str]) -> list[float]:
    return [0.5] * len(completions)


def same(completions: list[str], **_: Any) -> list[float]:
    """No signal in any group."""
    return [0.5] * len(completions)


LETTERS = 4


def letters(completions: list[str], case: list[str], **_: Any) -> list[float]:
    """The share of the first four characters that are letters of the case that the row asks for."""
    return _of_the_right_case(completions, case, 0, LETTERS)


def first_half(completions: list[str], case: list[str], **_: Any) -> list[float]:
    return _of_the_right_case(completions, case, 0, LETTERS // 2)


def second_half(completions: list[str], case: list[str], **_: Any) -> list[float]:
    return _of_the_right_case(completions, case, LETTERS // 2, LETTERS)


def _of_the_right_case(
    completions: list[str], case: list[str], start: int, stop: int
) -> list[float]:
    found = []
    for completion, asked in zip(completions, case, strict=True):
        low, high = "az" if asked == "small" else "AZ"
        right = sum(low <= letter <= high for letter in completion[start:stop])
        found.append(right / (stop - start))
    return found
