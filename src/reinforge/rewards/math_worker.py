"""What runs in the processes of the reward `math`: two answers, parsed and compared by math-verify.

Its SIGALRM timeouts stay off: they cannot interrupt C code, and the process is killed from outside.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

# it warns that somebody else must keep the time: the pool does
logging.getLogger("math_verify").setLevel(logging.ERROR)


def equal(answer: Sequence[str], gold: Sequence[str]) -> list[float | None]:
    return [_equal(a, g) for a, g in zip(answer, gold, strict=True)]


def _equal(answer: str, gold: str) -> float | None:
    from math_verify import verify

    wanted = _parsed(gold)
    if any(_undefined(w) for w in wanted):
        return None
    if _text(answer) == _text(gold):
        return 1.0
    if not wanted:  # words: nothing but the same words will do
        return 0.0
    got = [g for g in _parsed(answer) if not _undefined(g)]
    return float(bool(got) and verify(wanted, got, timeout_seconds=None))


def _parsed(text: str) -> list[Any]:
    """As LaTeX only: the parser for plain expressions ends in Python's `eval`."""
    from math_verify import LatexExtractionConfig, parse

    found = parse(
        f"${text}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None
    )
    return [f for f in found if not isinstance(f, str)]


def _undefined(value: Any) -> bool:
    import sympy

    return bool(getattr(value, "has", lambda *_: False)(sympy.nan, sympy.zoo))


def _text(text: str) -> str:
    """Words without their LaTeX: `\\text{ Evelyn }` is Evelyn."""
    return re.sub(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}", r"\1", text).strip().lower()
