"""Who watches a run that nobody was named for: the notebook that it was started in, or else the
terminal.
"""

from __future__ import annotations

from reinforge.watch.notebook import in_notebook
from reinforge.watch.notebook_view import NotebookView
from reinforge.watch.view import View


def default_view() -> View | NotebookView:
    """The view of this program."""
    return NotebookView() if in_notebook() else View()
