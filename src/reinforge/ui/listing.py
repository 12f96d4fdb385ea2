"""The list of runs. What was said of a run is said again as long as its files are the same."""

from __future__ import annotations

from typing import Any

from reinforge.ui import answers
from reinforge.ui.errors import NoSuchRun
from reinforge.ui.folder import RunsFolder
from reinforge.ui.run_pages import run_line
from reinforge.ui.run_record import stamp


class RunListing:
    """The lines of all runs. The app has one, which remembers those of runs that do not run."""

    def __init__(self, folder: RunsFolder):
        self.folder = folder
        self._known: dict[str, tuple[Any, answers.RunLine]] = {}

    def lines(self) -> list[answers.RunLine]:
        names = self.folder.names()
        self._known = {name: self._known[name] for name in names if name in self._known}
        return [line for name in names if (line := self._line(name)) is not None]

    def _line(self, name: str) -> answers.RunLine | None:
        """None where the run was removed in the meantime."""
        now = stamp(self.folder.root / name)
        there = self._known.get(name)
        if there is not None and there[0] == now and there[1].state != "running":
            return there[1]
        try:
            record = self.folder.record(name)
        except NoSuchRun:
            return None
        with record.lock:
            line = run_line(record)
        self._known[name] = (now, line)
        return line
