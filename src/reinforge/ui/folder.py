"""The folder of runs that the web app is about: which runs there are, and which paths are in it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path, PurePosixPath

from reinforge.core.errors import InputError
from reinforge.ui.errors import NoSuchRun
from reinforge.ui.run_record import RunRecord
from reinforge.watch.runs import find_runs, is_run

KEPT = 32  # runs whose logs are held in memory


class RunsFolder:
    """The runs under one folder, by their paths in it. Nothing outside of it is read: no `..`, no
    links that lead out.
    """

    def __init__(self, root: Path):
        self.root = root.resolve()
        self._records: OrderedDict[str, RunRecord] = OrderedDict()
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """All runs, as `run` is given in requests."""
        return [self.name_of(path) for path in find_runs(self.root)]

    def name_of(self, path: Path) -> str:
        """`.` is the folder itself."""
        return path.relative_to(self.root).as_posix()

    def place(self, name: str) -> Path:
        """The path of a name, whether there is something or not. Refuses what leads out."""
        pure = PurePosixPath(name)
        if not name or "\0" in name or pure.is_absolute() or ".." in pure.parts:
            raise InputError(
                f"{name!r} is no path inside the folder of runs.",
                where="run",
                fix="Give the path of a run relative to that folder.",
            )
        try:
            path = (self.root / pure).resolve()
        except (OSError, RuntimeError):
            path = Path("/")
        if not path.is_relative_to(self.root):
            raise InputError(
                f"{name!r} leads out of the folder of runs.",
                where="run",
                fix="Give the path of a run that lies in it.",
            )
        return path

    def path_of(self, name: str) -> Path:
        """The directory of a run."""
        path = self.place(name)
        try:
            found = is_run(path)
        except OSError:  # a name that is too long
            found = False
        if not found:
            raise NoSuchRun(
                f"there is no run {name!r}.",
                where="run",
                fix="The list of runs has all that there are.",
            )
        return path

    def record(self, name: str, *, fresh: bool = True) -> RunRecord:
        """What was read of a run; `fresh`: its metrics and events are brought up to date."""
        path = self.path_of(name)
        with self._lock:
            found = self._records.get(str(path))
            if found is None:
                found = self._records[str(path)] = RunRecord(path, self.name_of(path))
            self._records.move_to_end(str(path))
            while len(self._records) > KEPT:
                self._records.popitem(last=False)
        if fresh:
            found.refresh()
        return found
