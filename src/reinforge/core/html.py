"""Pieces of a page: text that is only text, and samples as a table. No style sheet and no script,
so that a notebook shows them too, with the colours of its theme.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape as html_escape
from typing import Any

from reinforge.core.visible import visible

GREY = "rgba(128,128,128,0.35)"  # seen on white and on black
PROMPT = 300  # characters of a prompt that are shown: its end
COMPLETION = 500  # ... of an answer: its beginning
CELL = f"text-align:left;vertical-align:top;padding:2px 10px 2px 0;border-top:1px solid {GREY}"
WRAPPED = f"{CELL};white-space:pre-wrap;overflow-wrap:anywhere"
NUMBER = f"{CELL};text-align:right"

SampleLine = tuple[str, str, float | None, str, int]  # prompt, completion, reward, stop, tokens


def escape(value: Any) -> str:
    """Text for a page. Lone surrogates cannot be written as UTF-8 and are shown by their code."""
    return html_escape(str(value).encode("utf-8", "backslashreplace").decode("utf-8"), quote=True)


def sample_table(samples: Iterable[SampleLine]) -> str:
    """Prompts, answers and rewards. What models and data wrote is text: it can mark up nothing, and
    what cannot be seen is shown by its code.
    """
    head = "".join(
        f'<th style="{CELL};font-weight:normal;opacity:0.7">{name}</th>'
        for name in ("prompt", "completion", "reward", "stop", "tokens")
    )
    body = "".join(_row(*sample) for sample in samples)
    return f'<table style="border-collapse:collapse"><tr>{head}</tr>{body}</table>'


def _row(prompt: str, completion: str, reward: float | None, stop: str, tokens: int) -> str:
    asked = prompt if len(prompt) <= PROMPT else "…" + prompt[1 - PROMPT :]
    said = completion if len(completion) <= COMPLETION else completion[: COMPLETION - 1] + "…"
    scored = "unscored" if reward is None else f"{reward:.3g}"
    return (
        f'<tr><td style="{WRAPPED}">{_lines(asked)}</td>'
        f'<td style="{WRAPPED}">{_lines(said)}</td>'
        f'<td style="{NUMBER};font-weight:bold">{scored}</td>'
        f'<td style="{CELL}">{escape(stop)}</td><td style="{NUMBER}">{tokens}</td></tr>'
    )


def _lines(text: str) -> str:
    return "\n".join(escape(visible(line)) for line in text.split("\n"))
