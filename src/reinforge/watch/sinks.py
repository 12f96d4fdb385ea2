"""Trackers beside metrics.jsonl: TensorBoard, Weights & Biases, MLflow, Trackio. Each is imported only when asked for.

A tracker must never slow or stop training: each gets its metrics through a bounded queue and a thread of its own, and the
first error switches it off with one event.
"""

from __future__ import annotations

import importlib
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from reinforge.core.errors import InputError

CLOSE_SECONDS = 10.0


class Sink(Protocol):
    name: str

    def open(self) -> None:
        """Connects; called in the sink's thread."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Background:
    """Feeds one sink from a thread. When the queue is full (the tracker hangs) metrics are dropped, not waited for."""

    def __init__(self, sink: Sink, failed: Callable[[str, str], None], size: int = 1000):
        self.sink, self.failed = sink, failed
        self.alive = True
        self._queue: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue(size)
        self._thread = threading.Thread(target=self._work, name=f"sink-{sink.name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if not self.alive:
            return
        try:
            self._queue.put_nowait((step, metrics))
        except queue.Full:
            self._disable("it did not take its metrics in time")

    def _work(self) -> None:
        try:
            self.sink.open()
            while (item := self._queue.get()) is not None:
                if not self.alive:
                    return
                self.sink.log(*item)
            self.sink.close()
        except Exception as error:  # whatever a tracker raises, training goes on
            self._disable(f"{type(error).__name__}: {error}")

    def _disable(self, error: str) -> None:
        if self.alive:
            self.alive = False
            self.failed(self.sink.name, error)

    def close(self) -> None:
        """Hands over what is queued and closes the tracker, but waits only so long."""
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            self._disable("it did not take its metrics in time")
        self._thread.join(CLOSE_SECONDS if self.alive else 0.1)
        if self._thread.is_alive():
            self._disable(f"it did not close within {CLOSE_SECONDS:.0f} s")


def _need(module: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(f"the sink {extra} needs a package that is not installed ({error}).", where="run.log.sinks",
                         fix=f"pip install 'reinforge[{extra}]', or remove it from run.log.sinks.") from error  # fmt: skip


@dataclass(frozen=True, slots=True)
class Target:
    """What a tracker is told about the run."""

    run_dir: Path
    config: Mapping[str, Any]
    project: str
    resume_step: int | None = None  # the last step that is kept; None for a new run

    def identity(self, name: str) -> str | None:
        """The tracker's own id of this run, so that a resumed run continues the same curve."""
        file = self.run_dir / f"{name}.id"
        return file.read_text().strip() if self.resume_step is not None and file.exists() else None

    def remember(self, name: str, identity: str) -> None:
        (self.run_dir / f"{name}.id").write_text(identity)


class TensorBoard:
    name = "tensorboard"

    def __init__(self, target: Target):
        self.target, self.module = target, _need("torch.utils.tensorboard", self.name)

    def open(self) -> None:
        step = self.target.resume_step
        self.writer = self.module.SummaryWriter(str(self.target.run_dir / "tensorboard"), purge_step=None if step is None else step + 1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            self.writer.add_scalar(key, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class Wandb:
    name = "wandb"

    def __init__(self, target: Target):
        self.target, self.module = target, _need("wandb", self.name)

    def open(self) -> None:
        t = self.target
        identity = t.identity(self.name) or secrets.token_hex(8)
        t.remember(self.name, identity)
        where = {"project": t.project, "name": t.run_dir.name, "dir": str(t.run_dir)}
        self.run = self.module.init(**where, config=dict(t.config), id=identity, resume="allow")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def close(self) -> None:
        self.run.finish()


class Mlflow:
    """Through the client: the module's functions keep their active run per thread."""

    name = "mlflow"

    def __init__(self, target: Target):
        self.target, self.module, self.entities = target, _need("mlflow", self.name), _need("mlflow.entities", self.name)

    def open(self) -> None:
        t = self.target
        self.client = self.module.MlflowClient()
        self.run_id = t.identity(self.name)
        if self.run_id is None:
            known = self.client.get_experiment_by_name(t.project)
            experiment = known.experiment_id if known else self.client.create_experiment(t.project)
            self.run_id = self.client.create_run(experiment, run_name=t.run_dir.name).info.run_id
            self.client.log_dict(self.run_id, dict(t.config), "config.json")
            t.remember(self.name, str(self.run_id))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self.client.log_batch(self.run_id, metrics=[self.entities.Metric(key, value, now, step) for key, value in metrics.items()])

    def close(self) -> None:
        self.client.set_terminated(self.run_id)


class Trackio:
    name = "trackio"

    def __init__(self, target: Target):
        self.target, self.module = target, _need("trackio", self.name)

    def open(self) -> None:
        t = self.target
        identity = t.identity(self.name) or f"{t.run_dir.name}-{secrets.token_hex(3)}"
        t.remember(self.name, identity)
        self.run = self.module.init(project=t.project, name=identity, config=dict(t.config), resume="allow")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def close(self) -> None:
        self.run.finish()


SINKS: dict[str, Callable[[Target], Sink]] = {sink.name: sink for sink in (TensorBoard, Wandb, Mlflow, Trackio)}


def make_sinks(names: Sequence[str], target: Target) -> list[Sink]:
    """The trackers named in run.log.sinks. A missing package is an error now; an unreachable server only later, as an event."""
    for name in names:
        if name not in SINKS:
            raise InputError(f"there is no sink called {name!r}.", where="run.log.sinks", fix=f"Choose from {', '.join(SINKS)}.")
    return [SINKS[name](target) for name in names]
