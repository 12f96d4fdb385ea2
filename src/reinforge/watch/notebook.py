"""The output of a notebook's cell, through IPython, which nothing else here imports. A notebook has
it; elsewhere it need not be installed.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any


def in_notebook() -> bool:
    """Whether this program is the kernel of a notebook, and neither a script nor the shell of
    IPython in a terminal.
    """
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


class NotebookOutput:
    """One output of a cell, which is shown anew in its place. `NotebookView` draws into it.

    No widgets and no script: the newest state is what the file of the notebook keeps.
    """

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, html: str, text: str) -> None:
        """`text` is for who cannot show HTML."""
        data = {"text/html": html, "text/plain": text}
        if self._handle is None:
            display = import_module("IPython.display").display
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)
