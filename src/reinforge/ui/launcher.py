"""Runs that are started from the web app: processes of their own, which outlive it.

A run is `python -m reinforge train FILE` in a session of its own. Its file and what it prints lie
in `.launched` in the folder of runs: a run directory holds what the run wrote and nothing else.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from reinforge.config.load import load_config
from reinforge.core.errors import InputError
from reinforge.ui.errors import NoSuchRun
from reinforge.ui.folder import RunsFolder
from reinforge.ui.work import environment
from reinforge.watch.logs import read_json, read_lines
from reinforge.watch.runs import is_run, status

FOLDER = ".launched"
LOG_BYTES = 64 << 10  # of a log that are shown


class Launcher:
    """Starts, stops and continues the runs of a folder. The app has one."""

    def __init__(self, folder: RunsFolder):
        self.folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()

    def launch(self, text: str, name: str) -> str:
        """Starts a run with the configuration `text`, in the new directory `name`."""
        target = self._new(name)
        file = self._file(name, "yaml")
        file.parent.mkdir(exist_ok=True)
        file.touch(0o600)  # it may have keys in it
        file.write_text(text, encoding="utf-8", errors="backslashreplace")
        try:  # what cannot be read is said at once
            load_config(file, [f"run.dir={target}"])
        except InputError as error:
            file.unlink()
            told = error.what.replace(f"{file}: ", "")
            raise InputError(told, where="yaml", fix=error.fix) from error
        self._start(name, ["train", str(file), f"run.dir={target}"])
        return name

    def resume(self, name: str) -> str:
        """Goes on from the newest checkpoint."""
        path = self.folder.path_of(name)
        if self.is_alive(name) or self._status(path) == "running":
            raise InputError(f"{name} is running.", where="run", fix="Stop it first.")
        file = self._file(name, "yaml")
        source = file if file.is_file() else path / "config.json"
        self._start(name, ["train", str(source), f"run.dir={path}"])
        return name

    def branch(self, run: str, step: int, name: str, overrides: Sequence[str]) -> str:
        """Goes on from a step of a run in the new directory `name`, with other settings."""
        path = self.folder.path_of(run)
        target = self._new(name)
        wrong = [o for o in overrides if o.startswith("-") or "=" not in o]
        if wrong:
            raise InputError(
                f"{wrong[0]!r} is no setting.", where="overrides", fix="Write KEY=VALUE."
            )
        command = ["runs", "branch", str(path), str(target), "--step", str(step), *overrides]
        self._start(name, command)
        return name

    def stop(self, name: str) -> None:
        """Asks a run to end, which saves a checkpoint first."""
        path = self.folder.place(name)
        process = self._processes.get(name)
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            return
        owner = read_json(path / "run.lock")
        pid = owner.get("pid")
        here = owner.get("host") == socket.gethostname()
        if not is_run(path) or self._status(path) != "running" or not isinstance(pid, int):
            raise InputError(f"{name} is not running.", where="run")
        if not here:
            raise InputError(
                f"{name} runs on {owner.get('host')}.", where="run", fix="Stop it there."
            )
        os.kill(pid, signal.SIGTERM)

    def is_alive(self, name: str) -> bool:
        """Whether a process that this app started for it is there."""
        process = self._processes.get(name)
        return process is not None and process.poll() is None

    def was_launched(self, name: str) -> bool:
        return self._file(name, "log").is_file()

    def log(self, name: str) -> dict[str, Any]:
        """The end of what a run printed that was started from here, and how its process is."""
        path = self._file(name, "log")
        if not path.is_file():
            raise NoSuchRun(f"{name!r} was not started from here.", where="run")
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LOG_BYTES))
            text = file.read().decode("utf-8", "replace")
        process = self._processes.get(name)
        code = None if process is None else process.poll()
        return {"text": text, "alive": self.is_alive(name), "code": code}

    # ---- help ----

    def _new(self, name: str) -> Path:
        target = self.folder.place(name)
        if any(part.startswith(".") for part in Path(name).parts) or target == self.folder.root:
            raise InputError(
                f"{name!r} is no name for a run.", where="name", fix="Use letters, digits and -."
            )
        if target.exists() or self.is_alive(name):
            raise InputError(f"{name} is there already.", where="name", fix="Use another name.")
        return target

    def _file(self, name: str, kind: str) -> Path:
        short = quote(name, safe="")
        if len(short) > 200:
            raise InputError("this name is too long.", where="name", fix="Use a shorter one.")
        folder = self.folder.root / FOLDER
        if folder.is_symlink():
            raise InputError(f"{folder} is a link.", where="name", fix="Remove it.")
        return folder / f"{short}.{kind}"

    def _start(self, name: str, command: Sequence[str]) -> None:
        place = self._file(name, "log")
        place.parent.mkdir(exist_ok=True)
        with self._lock, place.open("wb") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", "reinforge", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment(),
            )

    def _status(self, path: Path) -> str:
        return status(path, list(read_lines(path / "events.jsonl")))
