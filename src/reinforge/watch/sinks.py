"""What a tracker beside metrics.jsonl is asked to do, and the thread that feeds it.

A tracker (watch/trackers.py) gets the configuration when the run begins, the metrics of every step,
tables of samples, and at the end the summary and the files of the run. It must never slow or stop
training: each is fed through a bounded queue and a thread of its own, and the first error switches
it off. Who listens is told then, once; the run goes on.
"""

from __future__ import annotations

import os
import queue
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from reinforge.watch.sample_table import SampleTable

# for what is still queued at the end of the run, such as making MLflow's database on a busy machine
CLOSE_SECONDS = 60.0
# the same where checkpoints are handed over
UPLOAD_SECONDS = 3600.0
# the same where the run was asked to end: who asked may kill it soon, Kubernetes after 30 s
HURRIED_SECONDS = 10.0
# in the run directory: checkpoints that a tracker has not taken yet
HANDOVER = ".handover"


class Sink(Protocol):
    """A tracker that gets the metrics of a run: TensorBoard, W&B, MLflow, trackio, Prometheus.
    `make_sinks` makes those of a config; each runs in a thread of its own.
    """

    name: str

    def open(self) -> None:
        """Connects, and sends the configuration; called in the sink's thread."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def table(self, table: SampleTable) -> None: ...

    def keep(self, name: str, paths: Sequence[Path]) -> None:
        """Keeps files or folders of the run under a name: its record, a checkpoint."""
        ...

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The run has ended: how."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TrackerRun:
    """What a tracker is told about the run. The run makes it for `make_sinks`."""

    run_dir: Path
    config: Mapping[str, Any]
    project: str
    resume_step: int | None = None  # the last step that is kept; None for a new run
    named: bool = False  # the project is one that somebody chose: it wins over the environment's
    address: str = "127.0.0.1:0"  # where Prometheus is answered

    def identity(self, name: str) -> str | None:
        """The tracker's own id of this run, so that a resumed run continues the same curve."""
        file = self.run_dir / f"{name}.id"
        return file.read_text().strip() if self.resume_step is not None and file.exists() else None

    def remember(self, name: str, identity: str) -> None:
        (self.run_dir / f"{name}.id").write_text(identity)


class SinkThread:
    """Feeds one sink from a thread. The recorder makes one for each.

    When the queue is full (the tracker hangs) metrics are dropped, not waited for.
    """

    def __init__(self, sink: Sink, failed: Callable[[str, str], None], size: int = 1000):
        self.sink = sink
        self.failed = failed
        self.alive = True
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(size)
        self._thread = threading.Thread(target=self._work, name=f"sink-{sink.name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._put(partial(self.sink.log, step, metrics))

    def table(self, table: SampleTable) -> None:
        self._put(partial(self.sink.table, table))

    def keep(self, name: str, paths: Sequence[Path]) -> None:
        self._put(partial(self.sink.keep, name, paths))

    def keep_folder(self, name: str, folder: Path, waiting: Path) -> None:
        """The same for a folder that may be removed before its turn comes: its files are linked
        into `waiting` until the tracker has them.
        """
        if not self.alive:
            return
        try:
            waiting.mkdir(exist_ok=True)
            held = Path(tempfile.mkdtemp(dir=waiting)) / folder.name
            shutil.copytree(folder, held, copy_function=os.link)
        except OSError as error:
            self._disable(f"{folder.name} could not be linked for it: {error}")
            return
        self._put(partial(self._hand_over, name, held))

    def _hand_over(self, name: str, held: Path) -> None:
        try:
            self.sink.keep(name, [held])
        finally:
            shutil.rmtree(held.parent, ignore_errors=True)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._put(partial(self.sink.finish, summary))

    def _put(self, work: Callable[[], None] | None) -> None:
        if not self.alive:
            return
        try:
            self._queue.put_nowait(work)
        except queue.Full:
            self._disable("it did not take its metrics in time")

    def _work(self) -> None:
        try:
            self.sink.open()
            while (work := self._queue.get()) is not None:
                if not self.alive:
                    return
                work()
            self.sink.close()
        except Exception as error:  # whatever a tracker raises, training goes on
            self._disable(f"{type(error).__name__}: {error}")

    def _disable(self, error: str) -> None:
        if self.alive:
            self.alive = False
            self.failed(self.sink.name, error)

    def end(self) -> None:
        """Asks the tracker to close once it has what is queued."""
        self._put(None)

    def close(self, seconds: float) -> None:
        """After `end`: waits until the tracker is closed, but only so long."""
        self._thread.join(seconds if self.alive else min(seconds, 0.1))
        if self._thread.is_alive():
            self._disable("it did not close in time")
