"""Our own task: chains of sums.

Problem i is a function of (seed, i), needs no download, and cannot leak into evaluation.

A problem text belongs to exactly one split, decided by a hash of the text itself: about one text in
ten is an evaluation text, whatever the seed, the size or the other options. So `split: train` and
`split: eval` are disjoint by construction.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from reinforge.config.base import Count, Fraction, Section
from reinforge.core.errors import InputError
from reinforge.core.seeds import seed_of

ATTEMPTS = 1000  # draws per problem before we say that a split has none
Terms = Annotated[int, Field(ge=2, le=1000)]


class ChainOptions(Section):
    """Options of `arithmetic:chain`."""

    terms: Terms | tuple[Terms, Terms] = Field(
        (2, 4), description="Numbers per problem: one count, or (min, max)."
    )
    digits: Annotated[int, Field(ge=1, le=18)] | None = Field(
        None, description="Numbers of up to this many digits. Or give max_value."
    )
    max_value: Count = Field(99, description="The largest number in a problem.")
    operators: Annotated[str, Field(min_length=1, pattern=r"^[-+*]+$")] = Field(
        "+-", description="Any of + - *; drawn uniformly."
    )
    size: Count = Field(1000, description="Problems.")
    seed: int = 0
    split: Literal["train", "eval", "all"] = Field(
        "train", description="Which problem texts: about 90%, the other 10%, or both."
    )
    sloppy: Fraction = Field(
        0.0,
        description=(
            "The share of completions that forget the last number: demonstrations with mistakes."
            " The answer is always right."
        ),
    )
    scratch: bool | Fraction = Field(
        False,
        description=(
            "The completion shows each intermediate result before the answer: always, never, or for"
            " this share of the problems."
        ),
    )
    compare: bool = Field(
        False,
        description=(
            "Also the columns chosen (the right completion), rejected (one that forgets the last"
            " number), label (whether the completion is right) and score (1 or 0)."
        ),
    )
    graded: bool = Field(
        False,
        description=(
            "Also the attributes of the completion, each 4 or 0: correctness, and verbosity"
            " (whether it shows its steps)."
        ),
    )
    marker: str = Field(
        "#### ", description="What comes before the answer in a scratch completion."
    )

    @model_validator(mode="before")
    @classmethod
    def _digits(cls, data: dict[str, Any]) -> dict[str, Any]:
        if data.get("digits") is not None and "max_value" in data:
            raise ValueError("give digits or max_value, not both")
        return data

    @model_validator(mode="after")
    def _ordered(self) -> ChainOptions:
        if self.span[0] > self.span[1]:
            raise ValueError(f"terms {list(self.span)}: the minimum is above the maximum")
        return self

    @property
    def span(self) -> tuple[int, int]:
        return (self.terms, self.terms) if isinstance(self.terms, int) else self.terms

    @property
    def largest(self) -> int:
        return self.max_value if self.digits is None else 10**self.digits - 1


def split_of(text: str) -> Literal["train", "eval"]:
    """The one split that a problem text belongs to.

    >>> split_of("12+7-3=") == split_of("12+7-3=")
    True
    """
    return "eval" if seed_of("arithmetic", "split", text) % 10 == 0 else "train"


def solve(numbers: list[int], operators: list[str]) -> tuple[int, list[str]]:
    """The value, and the steps that lead to it: products first, then left to right.

    >>> solve([12, 7, 3], ["+", "-"])
    (16, ['12+7=19', '19-3=16'])
    """
    values = list(numbers)
    ops = list(operators)
    steps = []
    while ops:
        i = ops.index("*") if "*" in ops else 0
        a = values[i]
        op = ops.pop(i)
        b = values.pop(i + 1)
        values[i] = a * b if op == "*" else a + b if op == "+" else a - b
        steps.append(f"{a}{op}{b}={values[i]}")
    return values[0], steps


def problem(options: ChainOptions, index: int) -> dict[str, Any]:
    """Problem `index`: the first draw of its own random stream that lies in the wanted split."""
    for attempt in range(ATTEMPTS):
        rng = random.Random(seed_of(options.seed, "arithmetic:chain", index, attempt))
        numbers = [rng.randint(0, options.largest) for _ in range(rng.randint(*options.span))]
        operators = [rng.choice(options.operators) for _ in numbers[1:]]
        text = (
            str(numbers[0])
            + "".join(op + str(n) for op, n in zip(operators, numbers[1:], strict=True))
            + "="
        )
        if options.split in ("all", split_of(text)):
            answer, steps = solve(numbers, operators)
            if seed_of(options.seed, "arithmetic:sloppy", index) % 1000 < 1000 * options.sloppy:
                steps = solve(numbers[:-1], operators[:-1])[1]
            shown = (
                seed_of(options.seed, "arithmetic:scratch", index) % 1000 < 1000 * options.scratch
            )
            row: dict[str, Any] = {
                "prompt": text,
                "answer": str(answer),
                "completion": _written(steps, numbers[0], options, shown),
            }
            if options.compare:
                row |= _compared(numbers, operators, options, shown, row["completion"])
            if options.graded:
                right = row["completion"].rpartition(options.marker)[2] == str(answer)
                row |= {"correctness": 4 * right, "verbosity": 4 * shown}
            return row
    raise InputError(
        f"so few problems exist that none is in split {options.split}",
        where="arithmetic:chain",
        fix="Use more terms or larger numbers, or split: all.",
    )


def _compared(
    numbers: list[int], operators: list[str], options: ChainOptions, shown: bool, completion: str
) -> dict[str, Any]:
    """A right completion beside a wrong one; where forgetting the last number does no harm, the
    wrong one is off by one.
    """
    answer, steps = solve(numbers, operators)
    right = _written(steps, numbers[0], options, shown)
    wrong = _written(solve(numbers[:-1], operators[:-1])[1], numbers[0], options, shown)
    if wrong.rpartition(options.marker)[2] == str(answer):
        wrong = str(answer + 1)
    return {
        "chosen": right,
        "rejected": wrong,
        "label": completion == right,
        "score": float(completion == right),
    }


def _written(steps: list[str], first: int, options: ChainOptions, shown: bool) -> str:
    """What a demonstration writes: the last result alone, or all of them.

    Without a step (a sloppy sum of two) it is the first number.
    """
    results = [step.rpartition("=")[2] for step in steps] or [str(first)]
    return ",".join(steps) + f"\n{options.marker}{results[-1]}" if shown else results[-1]


def parse(kind: str, options: dict[str, Any]) -> ChainOptions:
    if kind != "chain":
        raise InputError(
            f"there is no arithmetic task {kind!r}",
            where=f"arithmetic:{kind}",
            fix="Did you mean arithmetic:chain?",
        )
    try:
        return ChainOptions.model_validate(options)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(["options", *(str(part) for part in first["loc"][:1])])
        known = ", ".join(ChainOptions.model_fields)
        raise InputError(
            first["msg"], where=f"arithmetic:{kind} {key}", fix=f"Its options are: {known}."
        ) from None


def generate(kind: str, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Problems 0, 1, 2, ... without end; the caller takes `options.size` of them."""
    parsed = parse(kind, options)
    return (problem(parsed, index) for index in count())
