"""The reward `math`: is the final answer equal to the gold answer, as mathematics?

Finding the answer and checking its size is plain string work and is done here; what is left is
parsed and compared by math-verify in a process that can be killed. What a rule decides is 0 (no
answer, too large, a restated question); only what depends on the clock, or a row whose gold answer
cannot be read, is unscored: otherwise a policy could escape a 0 by writing nonsense.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from reinforge.core.errors import InputError
from reinforge.rewards.literal import is_number_or_infinite, listed, literal, spaced, unnamed
from reinforge.rewards.outcome import RewardOutcome
from reinforge.rewards.pool import RewardPool

TARGET = "reinforge.rewards.math_worker:equal"
LONGEST = 1_000_000  # characters of a completion; a longer one has no answer
TAIL = 20_000  # characters at its end in which the answer is looked for
BOXES = 32  # more is guessing
MOST_OPEN = 100  # brackets open at once in a text without a box; more is no text
# of an answer
LENGTH = 400
DIGITS = 100
DEPTH = 12
TOWER = 2
EXPONENT = 1000
FACTORIAL = 200

_BOX = re.compile(r"\\f?boxed\s*\{")
_SAYS = re.compile(r"(?:final\s+answer|answer)\s*(?:is|=|:)+\s*([^\n]{1,400})", re.IGNORECASE)
_INLINE = re.compile(
    r"\$\$(.{1,400}?)\$\$|\$([^$\n]{1,400})\$|\\\((.{1,400}?)\\\)|\\\[(.{1,400}?)\\\]", re.DOTALL
)
_NUMBER = re.compile(
    r"(?<![\w.^])[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3}(?!\w))?(?:\s*/\s*\d+)?(?:\s*\\?%)?",
    re.ASCII,
)
_CHAINED = re.compile(r"(?:\^|\*\*)[{(\s]*(\d{1,9})[\s})]*[)}\]]\s*(?=(?:\^|\*\*)[{(\s]*(\d{1,9}))")
_FUNCTIONS = "sum|prod|int|lim|binom|choose|log|ln|sin|cos|tan|max|min|gcd"
_COMPUTES = re.compile(
    r"(?<=[\w)}!])\s*(?:[-+*÷]|\\(?:cdot|times|div|pm|mp)\b(?!\s*10\s*\^))|!|\\(?:"
    + _FUNCTIONS
    + r")(?![A-Za-z])"
)


def boxed(text: str) -> str | None:
    """What stands in the last \\boxed{...}; None if there is none, or it is never closed.

    >>> boxed(r"so \\boxed{1} or \\boxed{\\frac{1}{2}}.")
    '\\\\frac{1}{2}'
    """
    found = list(_BOX.finditer(text))
    if not found:
        return None
    start = found[-1].end()
    depth = 1
    for i in range(start, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[start:i]
    return None


def final_answer(text: str, *, boxed_only: bool = False) -> str | None:
    """The last \\boxed{}; without any, what stands after the last "answer is", or the last formula
    or number.
    """
    if len(text) > LONGEST or len(_BOX.findall(text)) > BOXES:
        return None
    tail = text[-TAIL:]
    if boxed_only or _BOX.search(text):
        return boxed(tail)
    if _depth(tail) > MOST_OPEN:
        return None
    says = [m.group(1) for m in _SAYS.finditer(tail)]
    place = says[-1] if says else tail
    inline = list(_INLINE.finditer(place))
    number = list(_NUMBER.finditer(place))
    if inline and (not number or inline[-1].end() >= number[-1].end()):
        return next(g for g in inline[-1].groups() if g is not None)
    if number:
        return number[-1].group()
    return place.strip().rstrip(".") if says else None


def too_large(answer: str) -> bool:
    """Whether parsing or computing it could cost more than an answer is worth."""
    if (
        len(answer) > LENGTH
        or any(ch.isdigit() and not ch.isascii() for ch in answer)
        or "__" in answer
    ):
        return True
    if any(len(run) > DIGITS for run in re.findall(r"[\d,.\s]+", answer)):
        return True
    if _depth(answer) > DEPTH or _tower(answer) > TOWER:
        return True
    powers = [int(n) for n in re.findall(r"(?:\^|\*\*)\s*[{(\s]*[-+]?(\d{1,9})", answer)]
    chained = [int(a) * int(b) // 10 for a, b in _CHAINED.findall(answer)]  # (10^9)^9
    factorials = [int(n) for n in re.findall(r"(\d{1,9})[\s)}]*!", answer)]
    largest = max([*powers, *chained], default=0)
    return largest > EXPONENT or any(n > FACTORIAL for n in factorials) or answer.count("!") > 3


def _depth(text: str) -> int:
    depth = deepest = 0
    for ch in text:
        depth += (ch in "{([") - (ch in "})]")
        deepest = max(deepest, depth)
    return deepest


def _tower(answer: str) -> int:
    """How many exponents stand on each other, at most: 2 in e^{x^2}."""
    highest = 0
    stack = [0]
    i = 0
    while i < len(answer):
        if answer[i] == "^" or answer.startswith("**", i):
            i += 1 if answer[i] == "^" else 2
            highest = max(highest, stack[-1] + 1)
            while i < len(answer) and answer[i] == " ":
                i += 1
            if i < len(answer) and answer[i] in "{(":
                stack.append(stack[-1] + 1)
                i += 1
            elif i + 1 < len(answer) and answer[i + 1 :].lstrip("0123456789 ").startswith(
                ("^", "**")
            ):
                stack[-1] += 1  # 5^5^5
            continue
        if answer[i] in "{([":
            stack.append(stack[-1])
        elif answer[i] in "})]" and len(stack) > 1:
            stack.pop()
        elif answer[i] in "+-=,;" and len(stack) == 1:
            stack[-1] = 0
        i += 1
    return highest


def gold_answer(gold: Any) -> str | None:
    """A gold answer as data sets write it: the answer, a solution with a box, or a solution that
    ends in `#### answer`.
    """
    text = "" if gold is None else str(gold).strip()
    if _BOX.search(text):
        text = boxed(text) or ""
    elif "####" in text:
        text = text.rpartition("####")[2]
    return text.strip().strip("$").strip() or None


def restates(answer: str, gold: str, prompt: str) -> bool:
    """Whether the answer only asks the question again.

    Where the gold answer is a number, whatever is still to be computed does: `2+2`,
    `\\frac{144}{12}`, `12^2` for 144. Where it is a list of numbers, this holds for its items.
    Where it is anything else (a root, a polynomial, a union of intervals), an equal expression is
    an answer, unless it computes something and stands in the prompt. A name before either, as in `x
    = 25`, `\\theta = 30^\\circ` or `x \\in [1,2]`, changes nothing.
    """
    tight = _tight(unnamed(answer))
    wanted = _tight(unnamed(gold))
    if tight == wanted:
        return False
    asked = tight in _tight(prompt)
    if (number := literal(gold)) is not None:
        found = literal(answer, joined=True)
        if found is None or not found.final(number):
            return True
        written = found.form[0] == "mixed" and found.form != number.form
        return asked and (found.form[0] == "scientific" or written)
    items = listed(gold)
    given = listed(answer)
    if items is not None and given is not None and all(map(is_number_or_infinite, items)):
        return not all(map(is_number_or_infinite, given))
    return asked and _COMPUTES.search(answer) is not None


def _tight(text: str) -> str:
    """Without spaces of any kind, and with one way to write a product and a fraction: for comparing
    texts.
    """
    text = re.sub(r"\\cdot(?![A-Za-z])|\\times(?![A-Za-z])|[×·]", "*", spaced(text))
    return re.sub(r"\s", "", re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text))


def decided(
    completion: str, gold: str | None, prompt: str, *, boxed_only: bool = False
) -> float | tuple[str, str] | None:
    """The score where a rule decides it; otherwise the two answers to compare."""
    if gold is None or too_large(gold):
        return None
    answer = final_answer(completion, boxed_only=boxed_only)
    if answer is None or not answer.strip():
        return 0.0
    answer = answer.strip().rstrip(".") or answer
    if too_large(answer) or restates(answer, gold, prompt):
        return 0.0
    given = literal(answer, joined=True)
    wanted = literal(gold)
    if given is None or wanted is None:
        return answer, gold
    bare = not (given.word or wanted.word or given.percent or wanted.percent)
    if bare and (given.value == wanted.value or given.ratio == wanted.ratio):
        return float(given.value == wanted.value)
    # 0.333333 for 1/3, 50% for 50: the library says how near is near
    return given.text, wanted.text


@dataclass
class MathReward:
    """`(prompts, completions, answer)` -> scores.

    `pool` compares what no rule decides; the same two answers are compared once.
    """

    pool: RewardPool
    boxed_only: bool = False
    known: dict[tuple[str, str], float | None] = field(default_factory=dict)

    async def __call__(
        self, prompts: Sequence[Any], completions: Sequence[str], answer: Sequence[Any]
    ) -> RewardOutcome:
        golds = [gold_answer(a) for a in answer]
        found = [
            decided(c, g, str(p), boxed_only=self.boxed_only)
            for c, g, p in zip(completions, golds, prompts, strict=True)
        ]
        pairs = list(dict.fromkeys(f for f in found if isinstance(f, tuple)))
        outcomes = dict(
            zip(pairs, await asyncio.gather(*(self._compare(*pair) for pair in pairs)), strict=True)
        )
        return RewardOutcome.joined(
            outcomes[f] if isinstance(f, tuple) else RewardOutcome([f]) for f in found
        )

    async def _compare(self, answer: str, gold: str) -> RewardOutcome:
        if (answer, gold) in self.known:
            return RewardOutcome([self.known[answer, gold]])
        outcome = await self.pool.call("math", {"answer": [answer], "gold": [gold]}, 1)
        if not outcome.timeouts and not outcome.crashes:
            if len(self.known) > 100_000:
                self.known.clear()
            self.known[answer, gold] = outcome.scores[0]
        return outcome


def math_reward(options: dict[str, Any], where: str, pool: Callable[[], RewardPool]) -> MathReward:
    unknown = set(options) - {"boxed_only"}
    if unknown:
        raise InputError(
            f"math has no option {', '.join(sorted(unknown))}.",
            where=where,
            fix="It has: boxed_only.",
        )
    return MathReward(pool(), **options)
