"""Rewards that need no model: pure functions of the completion and the row's columns.

All have the signature of a user's reward: `(prompts, completions, **columns) -> list[float | None]`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

MAX_DIGITS = 40  # a longer "number" is nonsense, and big integers are an attack on the parser
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?![\d])", re.ASCII)


def last_number(text: str) -> Decimal | None:
    """The last number written in `text`, thousands separators removed; None when there is none.

    >>> last_number("so 12 + 7 = 1,019."), last_number("no idea")
    (Decimal('1019'), None)
    """
    found = _NUMBER.findall(text[-10_000:].replace("\u2212", "-"))  # the typographic minus
    if not found:
        return None
    digits = found[-1].replace(",", "").rstrip(".")
    if len(digits) > MAX_DIGITS:
        return None
    try:
        return Decimal(digits)
    except InvalidOperation:
        return None


def exact_number(completions: Sequence[str], answer: Sequence[Any], tolerance: float = 0.0, **_: Any) -> list[float | None]:
    """1 if the last number of the completion equals the answer (within `tolerance`), else 0. None if the answer is no number."""
    scores: list[float | None] = []
    for completion, gold in zip(completions, answer, strict=True):
        want = last_number(str(gold))
        got = last_number(completion)
        scores.append(None if want is None else float(got is not None and abs(got - want) <= Decimal(str(tolerance))))
    return scores


def exact_match(
    completions: Sequence[str], answer: Sequence[Any], strip: bool = True, ignore_case: bool = False, **_: Any
) -> list[float | None]:
    """1 if the completion is the answer, else 0."""

    def normal(text: Any) -> str:
        text = str(text).strip() if strip else str(text)
        return text.lower() if ignore_case else text

    return [None if gold is None else float(normal(c) == normal(gold)) for c, gold in zip(completions, answer, strict=True)]


def regex(completions: Sequence[str], pattern: str, full: bool = False, **_: Any) -> list[float | None]:
    """1 if `pattern` is found in the completion (or matches all of it with `full`), else 0: a format reward."""
    compiled = re.compile(pattern, re.DOTALL)
    match = compiled.fullmatch if full else compiled.search
    return [float(match(c[:20_000]) is not None) for c in completions]


def reasoning_gym(completions: Sequence[str], entry: Sequence[Any], extract: str | None = None, **_: Any) -> list[float | None]:
    """The task's own scorer. `extract` is a regular expression whose group 1 is the answer, e.g. `<answer>(.*?)</answer>`."""
    from reasoning_gym import get_score_answer_fn

    scores: list[float | None] = []
    for completion, item in zip(completions, entry, strict=True):
        text: str | None = completion.strip()
        if extract is not None:
            found = re.findall(extract, completion[-20_000:], re.DOTALL)
            text = found[-1].strip() if found else None
        scores.append(float(get_score_answer_fn(item["metadata"]["source_dataset"])(text, item)))
    return scores


FUNCTIONS: dict[str, Callable[..., list[float | None]]] = {
    "exact_match": exact_match,
    "exact_number": exact_number,
    "regex": regex,
    "reasoning_gym": reasoning_gym,
}
