"""Texts that make a parser take for ever: for the reward `regex`, for the judge's replies, and for
the other built-in rewards.

None of them is a slow text for an honest reader: a linear parser is done in milliseconds, whatever
the machine.
"""

from __future__ import annotations

from typing import Any

R1 = "<think>.*?</think>.*?<answer>.*?</answer>$"  # as many users write it
# (pattern, completion): neither ends in this universe, or long after the timeout
REGEX: list[tuple[str, str]] = [
    (R1, "<think></think><answer></answer>" * 600 + "x"),
    (r"(a+)+$", "a" * 64 + "b"),
    (r"(a|a)*$", "a" * 64 + "b"),
    (r"(a|aa)+$", "a" * 96 + "b"),
    (r"(.*a){20}$", "a" * 64 + "b"),
    (r"^(\w+\s?)*$", "word " * 40 + "!"),
    (r"(x+x+)+y", "x" * 64),
    (r"^(([a-z])+.)+[A-Z]([a-z])+$", "a" * 64),
]

MANY = 300_000
JUDGE: list[str] = [  # replies in which nothing is said
    "score" + ":" * MANY,
    "score" + " " * MANY,
    "score:" + " " * MANY + "x",
    "score: " + "9" * MANY,
    "score: 1" + " " * MANY + "x",
    "score: 1 /" + " " * MANY + "x",
    "score: 1." + "0" * MANY + "x",
    "score\n" * (MANY // 6),
    "score:\n" * (MANY // 7),
    "\n" * MANY + "x",
    "*" * MANY + "score",
    ("*" * 100 + "score:") * (MANY // 100),
    "verdict" + ":" * MANY,
    "verdict:" + "*" * MANY + "c",
    "verdict: a" + "*" * MANY + "c",
    "verdict:\n" * (MANY // 9),
]


def texts(many: int) -> list[str]:
    """For rewards that read completions in the trainer: numbers, choices, tags, formulas."""
    return [
        "1," * many + "a",
        "1" * many + "a",
        "1." * many,
        "1" + " " * many + "a",
        "1/" * many,
        "1 / " * many,
        "-" * many,
        "answer:" + " " * many + "!",
        "answer is" + "(" * many,
        "answer is A" + ")" * many + "x",
        "answer:" * (many // 7),
        r"\boxed{A" + " " * many,
        r"\boxed{\text{A" + " " * many,
        r"\boxed{" * 30 + " " * many,
        r"\boxed{" + " " * many + "!",
        r"\boxed{A" + " " * many + "!",
        r"\boxed{\text{A}" + " " * many + "!",
        "answer is A" + " " * many + "x",
        "A" + "." * 290 + "\n",
        ("A" + "." * 290 + "\n") * 30,
        "$" * many,
        "$$" + "x" * many,
        r"\(" * (many // 2),
        "(" * many,
        "<think>" * (many // 7),
        "`" * many,
        "https://" * (many // 8),
        "final " * (many // 6),
        "x^" * many,
    ]


TEXTS = texts(9_000) + texts(MANY)  # within what is looked at, and beyond
# the rewards that read them, their options, and an answer that they take
ASKED: list[tuple[str, dict[str, Any], str]] = [
    ("exact_number", {}, "7"),
    ("exact_match", {}, "7"),
    ("number", {}, "7"),
    ("choice", {}, "A"),
    ("tags", {}, "7"),
    ("tag_count", {}, "7"),
    ("cosine_length", {"max_length": 100}, "7"),
    ("repetition", {}, "7"),
    ("language", {"language": "en"}, "7"),
]
