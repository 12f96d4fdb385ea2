"""A notebook's output cell: everything that a run says is one block of text, which is shown anew
when there is more of it.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from html import escape
from importlib import import_module
from typing import Any

# lines that are kept of a long run
HEAD = 20
TAIL = 200
STYLE = (
    "white-space:pre-wrap;line-height:1.35;font-family:Menlo,'DejaVu Sans Mono',Consolas,monospace"
)


class NotebookOutput(io.TextIOBase):
    """A file whose text is one output of a cell. `show` is IPython's display, if none is given."""

    def __init__(self, show: Callable[..., Any] | None = None):
        self._show: Callable[..., Any] = show or import_module("IPython.display").display
        self._handle: Any = None
        self._text = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._text += text
        if "\n" in text:
            self._update()
        return len(text)

    def _update(self) -> None:
        text = shortened(self._text)
        data = {"text/plain": text, "text/html": f'<pre style="{STYLE}">{escape(text)}</pre>'}
        if self._handle is None:
            self._handle = self._show(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


def shortened(text: str) -> str:
    """The first and the last lines of a long text, and how many are missing in between."""
    lines = text.splitlines()
    lost = len(lines) - HEAD - TAIL
    return (
        text
        if lost <= 0
        else "\n".join([*lines[:HEAD], f"... ({lost} lines)", *lines[-TAIL:]]) + "\n"
    )
