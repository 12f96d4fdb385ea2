"""Rewards that need no model: pure functions of the completion and the row's columns.

All have the signature of a user's reward: `(prompts, completions, **columns) -> list[float |
None]`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

MAX_DIGITS = 40  # a longer "number" is nonsense, and big integers are an attack on the parser
_CODE = re.compile(
    r"__|\b(?:exec|eval|open|compile|getattr|setattr|delattr|globals|locals|vars|input|breakpoint|exit|quit|print|help)\s*\("
)
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


def exact_number(
    completions: Sequence[str], answer: Sequence[Any], tolerance: float = 0.0, **_: Any
) -> list[float | None]:
    """1 if the last number of the completion equals the answer (within `tolerance`), else 0.

    None if the answer is no number.
    """
    scores: list[float | None] = []
    for completion, gold in zip(completions, answer, strict=True):
        want = last_number(str(gold))
        got = last_number(completion)
        scores.append(
            None
            if want is None
            else float(got is not None and abs(got - want) <= Decimal(str(tolerance)))
        )
    return scores


def exact_match(
    completions: Sequence[str],
    answer: Sequence[Any],
    strip: bool = True,
    ignore_case: bool = False,
    **_: Any,
) -> list[float | None]:
    """1 if the completion is the answer, else 0."""

    def normal(text: Any) -> str:
        text = str(text).strip() if strip else str(text)
        return text.lower() if ignore_case else text

    return [
        None if gold is None else float(normal(c) == normal(gold))
        for c, gold in zip(completions, answer, strict=True)
    ]


def regex(
    completions: Sequence[str], pattern: str, full: bool = False, **_: Any
) -> list[float | None]:
    """1 if `pattern` is found in the completion (or matches all of it with `full`), else 0: a
    format reward.
    """
    compiled = re.compile(pattern, re.DOTALL)
    match = compiled.fullmatch if full else compiled.search
    return [float(match(c[:20_000]) is not None) for c in completions]


def reasoning_gym(
    completions: Sequence[str], entry: Sequence[Any], extract: str | None = None, **_: Any
) -> list[float | None]:
    """The task's own scorer.

    `extract` is a regular expression whose group 1 is the answer, e.g. `<answer>(.*?)</answer>`.
    """
    from reasoning_gym import get_score_answer_fn

    scores: list[float | None] = []
    for completion, item in zip(completions, entry, strict=True):
        text: str | None = completion.strip()
        if extract is not None:
            found = re.findall(extract, completion[-20_000:], re.DOTALL)
            text = found[-1].strip() if found else None
        # some scorers `eval` what they are given
        if text is not None and (len(text) > 20_000 or _CODE.search(text)):
            scores.append(0.0)
            continue
        scores.append(float(get_score_answer_fn(item["metadata"]["source_dataset"])(text, item)))
    return scores


_VALUE = re.compile(
    r"(?<![\w.])([-+]?)(\d[\d,]*(?:\.\d*)?|\.\d+)(?:[eE]([-+]?\d{1,3}))?(?:\s*/\s*(\d{1,40}))?\s*(\\?%)?(?![\w])",
    re.ASCII,
)


def last_value(text: str) -> Fraction | None:
    """Like `last_number`, and reads 1e-3, 3/4 and 50% too; None when there is no number, it is too
    long, or it divides by 0. Exact, however many digits it has.

    >>> last_value("about 3/4"), last_value("so 50%"), last_value("1.5e3"), last_value("1/0")
    (Fraction(3, 4), Fraction(1, 2), Fraction(1500, 1), None)
    """
    found = list(_VALUE.finditer(text[-10_000:].replace("\u2212", "-")))
    if not found:
        return None
    sign, digits, exponent, below, percent = found[-1].groups()
    if len(digits) > MAX_DIGITS or (below is not None and int(below) == 0):
        return None
    value = Fraction(Decimal(sign + digits.replace(",", "").rstrip("."))) / int(below or 1)
    return value * Fraction(10) ** int(exponent or 0) / (100 if percent else 1)


def number(
    completions: Sequence[str],
    answer: Sequence[Any],
    tolerance: float = 0.0,
    relative: float = 0.0,
    **_: Any,
) -> list[float | None]:
    """1 if the last number is the answer's, within `tolerance` + `relative` x |answer|.

    Fractions, percents and 1e-3 are numbers.
    """
    scores: list[float | None] = []
    for completion, gold in zip(completions, answer, strict=True):
        want = last_value(str(gold))
        got = last_value(completion)
        if want is None:
            scores.append(None)
            continue
        allowed = Fraction(str(tolerance)) + Fraction(str(relative)) * abs(want)
        scores.append(float(got is not None and abs(got - want) <= allowed))
    return scores


_CHOICE = r"[(\[{*\s]*([A-Ja-j])[)\]}*.\s]*"
_STATED = re.compile(
    r"(?:answer|choice|option)\s*(?:is|=|:)" + _CHOICE + r"(?![\w'])", re.IGNORECASE
)
_BOXED = re.compile(r"\\boxed\s*\{\s*(?:\\text\s*\{\s*)?\(?([A-Ja-j])\)?\s*(?:\}\s*)?\}")
_ALONE = re.compile(_CHOICE + r"(?:[:.)].{0,200})?", re.DOTALL)
_LETTER = re.compile(r"(?<![A-Za-z'])\(?([A-J])\)?(?![A-Za-z'])")


def chosen(text: str) -> str | None:
    """The letter that a completion settles on: the last boxed one, the last that is stated as the
    answer, or the only one that stands alone on a line, the last. None if there is none, or
    several.
    """
    text = text[-10_000:].strip()
    if boxed := _BOXED.findall(text):
        return boxed[-1].upper()
    if stated := list(_STATED.finditer(text)):
        line = text[stated[-1].start() :].split("\n")[0]
        return stated[-1].group(1).upper() if len(set(_LETTER.findall(line))) <= 1 else None
    alone = [
        m for line in text.split("\n") if len(line) < 300 and (m := _ALONE.fullmatch(line.strip()))
    ]
    named = {m.group(1).upper() for m in alone} | {
        letter for m in alone for letter in _LETTER.findall(m.string)
    }
    return (
        alone[-1].group(1).upper()
        if alone and text.endswith(alone[-1].string) and len(named) == 1
        else None
    )


def choice(
    completions: Sequence[str],
    answer: Sequence[Any],
    choices: Sequence[Any] | None = None,
    **_: Any,
) -> list[float | None]:
    """1 if the completion settles on the right letter.

    The answer is a letter, a place in `choices` (0 is A), or one of its texts.
    """
    scores: list[float | None] = []
    for i, (completion, gold) in enumerate(zip(completions, answer, strict=True)):
        options = (
            [str(c).strip() for c in choices[i]]
            if choices is not None and choices[i] is not None
            else []
        )
        wanted = _right_letter(gold, options)
        scores.append(None if wanted is None else float(chosen(completion) == wanted))
    return scores


def _right_letter(gold: Any, options: Sequence[str]) -> str | None:
    if isinstance(gold, int) and not isinstance(gold, bool):
        return chr(ord("A") + gold) if 0 <= gold < 10 else None
    text = str(gold).strip()
    if text in options:
        return chr(ord("A") + options.index(text))
    letter = re.fullmatch(r"\(?([A-Ja-j])\)?\.?", text)
    return letter.group(1).upper() if letter else None


FUNCTIONS: dict[str, Callable[..., list[float | None]]] = {
    "exact_match": exact_match,
    "exact_number": exact_number,
    "number": number,
    "choice": choice,
    "regex": regex,
    "reasoning_gym": reasoning_gym,
}
