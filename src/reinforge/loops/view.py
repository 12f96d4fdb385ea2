"""What a run shows while it goes, as a contract: `watch/view.py` draws it in a terminal,
`watch/notebook_view.py` in a notebook.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from reinforge.core.sample import Group
from reinforge.watch.doctor.trouble import Trouble


class ViewLike(Protocol):
    """Who watches a run: the bar at a terminal, a notebook, nobody. Whoever starts the run gives
    one; builders and the run tell it what happens.

    That nobody can see it any more, because its terminal is gone, is no error of a view.
    """

    def start(self, total_steps: int, title: str, first_step: int = 0) -> None: ...

    def update(self, step: int, metrics: dict[str, float]) -> None: ...

    def table(self, groups: Iterable[Group]) -> None:
        """Samples of a step, to read."""
        ...

    def message(self, text: str) -> None: ...

    def doing(self, text: str) -> None:
        """What the run is busy with now, until it says something else."""
        ...

    def troubles(self, found: Sequence[Trouble]) -> None:
        """What speaks against the run so far: all of it, every time."""
        ...

    def stop(self) -> None: ...


class NoView:
    """A view that shows nothing: in an actor of a cluster, or after the terminal has closed."""

    def start(self, total_steps: int, title: str, first_step: int = 0) -> None: ...
    def update(self, step: int, metrics: dict[str, float]) -> None: ...
    def table(self, groups: Iterable[Group]) -> None: ...
    def message(self, text: str) -> None: ...
    def doing(self, text: str) -> None: ...
    def troubles(self, found: Sequence[Trouble]) -> None: ...
    def stop(self) -> None: ...
