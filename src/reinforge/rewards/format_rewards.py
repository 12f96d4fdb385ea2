"""Rewards of form: tags, length, repetition, language.

Pure functions of the text; most are meant beside a reward of content.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

from reinforge.core.errors import InputError
from reinforge.rewards.verifiable import exact_match, exact_number

SEEN = 20_000  # characters that are looked at
DEFAULT_TAGS = ("think", "answer")
SCRIPTS: Mapping[str, tuple[str, ...]] = {  # beginnings of the Unicode names of letters
    "latin": ("LATIN",),
    "cyrillic": ("CYRILLIC",),
    "greek": ("GREEK",),
    "arabic": ("ARABIC",),
    "hebrew": ("HEBREW",),
    "devanagari": ("DEVANAGARI",),
    "thai": ("THAI",),
    "hangul": ("HANGUL",),
    "han": ("CJK",),
    "japanese": ("CJK", "HIRAGANA", "KATAKANA"),
}
LANGUAGES = {
    "en": "latin",
    "de": "latin",
    "fr": "latin",
    "es": "latin",
    "it": "latin",
    "pt": "latin",
    "vi": "latin",
    "ru": "cyrillic",
    "uk": "cyrillic",
    "el": "greek",
    "ar": "arabic",
    "he": "hebrew",
    "hi": "devanagari",
    "th": "thai",
    "ko": "hangul",
    "zh": "han",
    "ja": "japanese",
}
_FORMULA = re.compile(r"\$[^$]{1,2000}\$|`[^`]{1,2000}`|\\[A-Za-z]+|https?://\S+")


def tags(
    completions: Sequence[str], tags: Sequence[str] = DEFAULT_TAGS, **_: Any
) -> list[float | None]:
    """1 if the completion is `<a>...</a> <b>...</b>`: every tag once, in this order, not empty, and
    nothing around them.
    """
    return [float(_well_formed(c, tags)) for c in completions]


def _well_formed(text: str, names: Sequence[str]) -> bool:
    at = 0
    for name in names:
        opening = f"<{name}>"
        closing = f"</{name}>"
        if text.count(opening) != 1 or text.count(closing) != 1:
            return False
        start = text.find(opening)
        end = text.find(closing)
        if start < at or text[at:start].strip() or not text[start + len(opening) : end].strip():
            return False
        at = end + len(closing)
    return not text[at:].strip()


def tag_count(
    completions: Sequence[str], tags: Sequence[str] = DEFAULT_TAGS, **_: Any
) -> list[float | None]:
    """The share of opening and closing tags that occur exactly once: a slope towards `tags`."""
    wanted = [t for name in tags for t in (f"<{name}>", f"</{name}>")]
    return [sum(c.count(t) == 1 for t in wanted) / max(1, len(wanted)) for c in completions]


def cosine_length(
    completions: Sequence[str],
    answer: Sequence[Any],
    max_length: int,
    correct: Literal["exact_number", "exact_match"] = "exact_number",
    right: Sequence[float] = (1.0, 0.5),
    wrong: Sequence[float] = (-0.5, 0.0),
    exceed: float = -0.5,
    **_: Any,
) -> list[float | None]:
    """Cosine length reward (2502.03373): r(n) = r_L + (r_0 - r_L)(1 + cos(πn/L))/2 with its own
    [r_0, r_L] for right and wrong answers, n and L in characters, and `exceed` from L on. Right
    ones are better short; wrong ones are worse short.
    """
    judges: dict[str, Callable[..., list[float | None]]] = {
        "exact_number": exact_number,
        "exact_match": exact_match,
    }
    judge = judges.get(correct)
    if judge is None:
        raise InputError(
            f"{correct!r} does not tell right from wrong.",
            where="rewards.options.correct",
            fix="There are: exact_number, exact_match.",
        )
    out: list[float | None] = []
    for text, verdict in zip(completions, judge(completions, answer), strict=True):
        first, last = right if verdict else wrong
        n = len(text)
        out.append(
            None
            if verdict is None
            else (
                exceed
                if n >= max_length
                else last + (first - last) * (1 + math.cos(math.pi * n / max_length)) / 2
            )
        )
    return out


def repetition(
    completions: Sequence[str], n: int = 4, unit: Literal["words", "characters"] = "words", **_: Any
) -> list[float | None]:
    """The share of n-grams that occurred before in the same completion, from 0 to 1.

    Give it a negative weight.

    >>> repetition(["a b a b a b", "a b c d", ""], n=2)
    [0.6, 0.0, 0.0]
    """
    return [
        _repeated(c[:SEEN].lower().split() if unit == "words" else list(c[:SEEN]), n)
        for c in completions
    ]


def _repeated(items: Sequence[str], n: int) -> float:
    grams = [tuple(items[i : i + n]) for i in range(len(items) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def language(
    prompts: Sequence[Any], completions: Sequence[str], language: str = "prompt", **_: Any
) -> list[float | None]:
    """The share of letters that are of the language's script; formulas, code and links do not
    count. `prompt`: the script that most letters of the prompt have. 1 for a text without letters,
    0 for no text. None if the prompt has no letters.
    """
    fixed = None if language == "prompt" else _script(language)
    out: list[float | None] = []
    for prompt, text in zip(prompts, completions, strict=True):
        script = fixed or _main_script(
            prompt
            if isinstance(prompt, str)
            else " ".join(str(m.get("content") or "") for m in prompt)
        )
        letters = [ch for ch in _FORMULA.sub(" ", text[:SEEN]) if ch.isalpha()]
        if script is None:
            out.append(None)
        elif not text.strip():
            out.append(0.0)
        else:
            out.append(sum(_is(ch, script) for ch in letters) / len(letters) if letters else 1.0)
    return out


def _script(name: str) -> str:
    found = LANGUAGES.get(name, name)
    if found not in SCRIPTS:
        raise InputError(
            f"{name!r} is no language that is known by its script.",
            where="rewards.options.language",
            fix=f"There are: prompt, {', '.join((*LANGUAGES, *SCRIPTS))}.",
        )
    return found


@lru_cache(maxsize=4096)
def _is(ch: str, script: str) -> bool:
    return unicodedata.name(ch, "").startswith(SCRIPTS[script])


def _main_script(text: str) -> str | None:
    letters = [ch for ch in _FORMULA.sub(" ", text[:SEEN]) if ch.isalpha()]
    counts = {script: sum(_is(ch, script) for ch in letters) for script in SCRIPTS}
    counts["japanese"] = (
        counts["japanese"]
        if any(_is(ch, "japanese") and not _is(ch, "han") for ch in letters)
        else 0
    )
    best = max(counts, key=lambda s: (counts[s], s == "japanese"))
    return best if counts[best] else None
