"""What the web app holds of one run: its logs, read as far as they are written, each line once."""

from __future__ import annotations

import json
import math
import os
import re
import threading
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from reinforge.ui.sample_index import SampleIndex
from reinforge.watch.columns import MetricColumns, number
from reinforge.watch.doctor.doctor import Doctor
from reinforge.watch.doctor.learning import SIGNS
from reinforge.watch.doctor.trouble import Trouble
from reinforge.watch.logs import LogTail, flatten, parse_line, read_json
from reinforge.watch.runs import RunProgress, describe_run, status, total_steps
from reinforge.watch.why import FILE as GROUPS

BLOCK = 256  # lines of metrics that are added at once
RECENT = 20  # steps whose mean time tells how long the rest takes
TAGS = "tags.json"
STEP = re.compile(rb'\{"step": (\d+)')


class RunRecord:
    """One run directory. `RunsFolder` keeps it and calls `refresh` before anybody reads it."""

    def __init__(self, path: Path, name: str):
        self.path = path
        self.name = name
        self.lock = threading.RLock()
        self.events: list[dict[str, Any]] = []
        self._metrics = LogTail(path / "metrics.jsonl")
        self._events = LogTail(path / "events.jsonl")
        self._signature: Any = None
        self._samples = SampleIndex(path)
        self._starting = threading.Lock()
        self._indexer: threading.Thread | None = None
        self._groups = LogTail(path / GROUPS)
        self._group_steps: list[int] = []
        self._begin()

    def _begin(self) -> None:
        self.config: dict[str, Any] = {}  # by dotted keys
        self.columns = MetricColumns()
        self.progress = RunProgress()
        self.events = []
        self.doctor = Doctor.for_run(self.path)
        self._troubles: list[Trouble] | None = None
        self._troubles_of = ""

    def refresh(self) -> None:
        """Reads what was appended since the last time."""
        with self.lock:
            now = stamp(self.path)
            if now != self._signature:
                self._signature = now
                self._read()

    def _read(self) -> None:
        self.config = flatten(read_json(self.path / "config.json"))
        metrics = self._metrics.read()
        while block := list(islice(metrics, BLOCK)):
            self._add([line for _, raw in block if (line := parse_line(raw))])
        events = [line for _, raw in self._events.read() if (line := parse_line(raw))]
        if self._metrics.restarted or self._events.restarted:
            self._metrics = LogTail(self.path / "metrics.jsonl")
            self._events = LogTail(self.path / "events.jsonl")
            self._begin()
            self._read()
            return
        for event in events:
            self.doctor.hear(event)
        self.events += events
        self._troubles = None

    def _add(self, told: Sequence[Mapping[str, Any]]) -> None:
        """Lines of metrics."""
        lines = [line for line in told if isinstance(line.get("step"), int)]
        for line in lines:
            self.progress.observe(line)
        self.doctor.observe_lines(lines)
        self.columns.add(lines)

    # ---- what is asked of it ----

    @property
    def status(self) -> str:
        return status(self.path, self.events)

    def troubles(self) -> Sequence[Trouble]:
        how = self.status
        if self._troubles is None or self._troubles_of != how:
            self._troubles = self.doctor.troubles(ended=how != "running")
            self._troubles_of = how
        return self._troubles

    def describe(self) -> dict[str, Any]:
        """What `reinforge runs show` says."""
        return describe_run(self.path, self.config, self.progress, self.events, self.troubles())

    def main_metric(self) -> str | None:
        """The metric that says whether it learns."""
        names = [name for name, _ in SIGNS if name in self.columns.columns]
        return names[0] if names else None

    def eta_seconds(self) -> float | None:
        """Of a run that goes on: what the steps that are left take at the pace of the last ones."""
        steps = total_steps(self.events, self.config)
        times = self.columns.columns.get("time/step")
        if self.status != "running" or not steps or times is None or not times.values:
            return None
        recent = [t for t in times.values[-RECENT:] if t == t]
        left = max(0, steps - self.progress.step)
        return left * sum(recent) / len(recent) if recent else None

    def told_at(self) -> float | None:
        """When it wrote last, by its own clock: a copy of a run has other file times."""
        events = [at for event in self.events[-1:] if (at := number(event.get("time"))) is not None]
        told = [at for at in (*events, *self.columns.times[-1:]) if math.isfinite(at)]
        return max(told, default=None)

    def samples(self) -> SampleIndex:
        """The index of its samples, brought up to date."""
        self._samples.refresh()
        return self._samples

    def index_is_near(self) -> bool:
        """Whether `samples` answers soon."""
        return self._samples.is_near()

    def newest_samples(self, most: int) -> tuple[int, list[tuple[int, dict[str, Any]]]]:
        """Without the index, which a thread makes in the meantime: how many lines there are, and
        the last samples.
        """
        found = self._samples.newest(most)
        with self._starting:
            if self._indexer is None or not self._indexer.is_alive():
                self._indexer = threading.Thread(target=self._make_index, daemon=True)
                self._indexer.start()
        return found

    def _make_index(self) -> None:
        self.refresh()  # the page about samples asks for this too, and shows it first
        self._samples.refresh()

    def group_steps(self) -> list[int]:
        """Steps of which groups.jsonl tells."""
        with self.lock:
            for _, raw in self._groups.read():
                match = STEP.match(raw)
                if match:
                    self._group_steps.append(int(match[1]))
            if self._groups.restarted:
                self._groups = LogTail(self.path / GROUPS)
                self._group_steps = []
                return self.group_steps()
            return sorted(set(self._group_steps))

    def set_tags(self, tags: Sequence[str]) -> None:
        part = self.path / f".{TAGS}.part"
        part.write_text(json.dumps({"tags": list(tags)}), encoding="utf-8")
        os.replace(part, self.path / TAGS)

    def name_of_inside(self, path: str) -> str:
        """A path in the run directory, relative to it."""
        return Path(path).relative_to(self.path).as_posix()

    def tags(self) -> list[str]:
        found: Mapping[str, Any] = read_json(self.path / TAGS)
        return [tag for tag in found.get("tags", []) if isinstance(tag, str)]


def stamp(run_dir: Path) -> list[Any]:
    """What changes whenever something is written that the list of runs tells."""
    found: list[Any] = []
    for name in ("metrics.jsonl", "events.jsonl", "config.json", TAGS):
        try:
            stat = (run_dir / name).stat()
            found.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
        except OSError:
            found.append(None)
    return found
