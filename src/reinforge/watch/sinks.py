"""Trackers beside metrics.jsonl: TensorBoard, Weights & Biases, MLflow, Trackio. Each is imported
only when asked for.

A tracker gets the configuration when the run begins, the metrics of every step, and at the end the
summary and a table of samples. It must never slow or stop training: each is fed through a bounded
queue and a thread of its own, and the first error switches it off. Who listens is told then, once;
the run goes on.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from reinforge.core.errors import InputError

# for what is still queued at the end of the run, such as making MLflow's database on a busy machine
CLOSE_SECONDS = 60.0
# the same where the run was asked to end: who asked may kill it soon, Kubernetes after 30 s
HURRIED_SECONDS = 10.0
COLUMNS = ("step", "prompt", "completion", "reward", "stop", "length")  # of the table of samples
TEXT = 2000  # characters of a prompt or completion in that table

Sampled = Sequence[Mapping[str, Any]]  # lines of samples.jsonl


class Sink(Protocol):
    """A tracker that gets the metrics of a run: TensorBoard, W&B, MLflow, trackio. `make_sinks`
    makes those of a config; each runs in a thread of its own.
    """

    name: str

    def open(self) -> None:
        """Connects, and sends the configuration; called in the sink's thread."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def finish(self, summary: Mapping[str, Any], samples: Sampled) -> None:
        """The run has ended: how, and what its last logged samples were."""
        ...

    def close(self) -> None: ...


class SinkThread:
    """Feeds one sink from a thread.

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

    def finish(self, summary: Mapping[str, Any], samples: Sampled) -> None:
        self._put(partial(self.sink.finish, summary, samples))

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


def _need(module: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            f"the sink {extra} needs a package that is not installed ({error}).",
            where="run.log.sinks",
            fix=f"pip install 'reinforge[{extra}]', or remove it from run.log.sinks.",
        ) from error


@dataclass(frozen=True, slots=True)
class TrackerRun:
    """What a tracker is told about the run."""

    run_dir: Path
    config: Mapping[str, Any]
    project: str
    resume_step: int | None = None  # the last step that is kept; None for a new run
    named: bool = False  # the project is one that somebody chose: it wins over the environment's

    def identity(self, name: str) -> str | None:
        """The tracker's own id of this run, so that a resumed run continues the same curve."""
        file = self.run_dir / f"{name}.id"
        return file.read_text().strip() if self.resume_step is not None and file.exists() else None

    def remember(self, name: str, identity: str) -> None:
        (self.run_dir / f"{name}.id").write_text(identity)


def rows_of(samples: Sampled) -> list[list[Any]]:
    """The table of samples, by COLUMNS."""

    def cell(value: Any) -> Any:
        return value[:TEXT] if isinstance(value, str) else value

    return [[cell(sample.get(name)) for name in COLUMNS] for sample in samples]


def unless_set(**defaults: tuple[str, Any]) -> dict[str, Any]:
    """Arguments whose environment variable is not set: `unless_set(name=("WANDB_NAME", "first"))`.
    What the environment says wins.
    """
    return {
        name: value for name, (variable, value) in defaults.items() if not os.environ.get(variable)
    }


def markdown_table(rows: Sequence[Sequence[Any]]) -> str:
    """For TensorBoard. Text of models and data is code there: nothing in it is markup."""

    def cell(value: Any) -> str:
        text = (
            ""
            if value is None
            else str(value).replace("`", "'").replace("|", "\\|").replace("\n", " ⏎ ")
        )
        return f"`{text}`" if isinstance(value, str) and text else text

    return "\n".join(
        [
            "| " + " | ".join(map(cell, row)) + " |"
            for row in ([*map(_Plain, COLUMNS)], [_Plain("---")] * len(COLUMNS), *rows)
        ]
    )


class _Plain:
    """A heading: shown as it is."""

    def __init__(self, text: str):
        self.text = text

    def __str__(self) -> str:
        return self.text


def fenced(value: Any) -> str:
    """JSON as a block of code."""
    return f"```json\n{json.dumps(value, indent=1, default=str)}\n```"


class TensorBoard:
    """A `Sink`: event files in the run directory."""

    name = "tensorboard"

    def __init__(self, target: TrackerRun):
        self.target, self.module = target, _need("torch.utils.tensorboard", self.name)

    def open(self) -> None:
        step = self.target.resume_step
        self.writer = self.module.SummaryWriter(
            str(self.target.run_dir / "tensorboard"), purge_step=None if step is None else step + 1
        )
        self.writer.add_text("config", fenced(self.target.config), step or 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            self.writer.add_scalar(key, value, step)
        self.writer.flush()

    def finish(self, summary: Mapping[str, Any], samples: Sampled) -> None:
        step = int(summary.get("steps") or 0)
        self.writer.add_text("summary", fenced(summary), step)
        if samples:
            self.writer.add_text("samples", markdown_table(rows_of(samples)), step)

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """A `Sink`: Weights & Biases."""

    name = "wandb"

    def __init__(self, target: TrackerRun):
        self.target, self.module = target, _need("wandb", self.name)

    def open(self) -> None:
        t = self.target
        identity = os.environ.get("WANDB_RUN_ID") or t.identity(self.name) or secrets.token_hex(8)
        t.remember(self.name, identity)
        ours = unless_set(
            project=("" if t.named else "WANDB_PROJECT", t.project),
            name=("WANDB_NAME", t.run_dir.name),
            dir=("WANDB_DIR", str(t.run_dir)),
            resume=("WANDB_RESUME", "allow"),
        )
        self.run = self.module.init(**ours, config=dict(t.config), id=identity)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def finish(self, summary: Mapping[str, Any], samples: Sampled) -> None:
        self.run.summary.update(
            {name: value for name, value in summary.items() if name != "metrics"}
        )
        if samples:
            self.run.log(
                {"samples": self.module.Table(columns=list(COLUMNS), data=rows_of(samples))}
            )

    def close(self) -> None:
        self.run.finish()


# what the name of a metric may not have in MLflow: eval/pass@4
UNNAMEABLE = re.compile(r"[^\w\-. :/]")
# in MLflow's words; everything else failed
ENDED = {"finished": "FINISHED", "terminated": "KILLED"}


class Mlflow:
    """Through the client: the module's functions keep their active run per thread."""

    name = "mlflow"

    def __init__(self, target: TrackerRun):
        self.target, self.module, self.entities = (
            target,
            _need("mlflow", self.name),
            _need("mlflow.entities", self.name),
        )

    ending = "FINISHED"

    def open(self) -> None:
        t = self.target
        self.client = self.module.MlflowClient()
        self.run_id = t.identity(self.name)
        if self.run_id is None:
            project = (
                t.project if t.named else os.environ.get("MLFLOW_EXPERIMENT_NAME") or t.project
            )
            known = self.client.get_experiment_by_name(project)
            experiment = known.experiment_id if known else self.client.create_experiment(project)
            name = os.environ.get("MLFLOW_RUN_NAME") or t.run_dir.name
            self.run_id = self.client.create_run(experiment, run_name=name).info.run_id
            self.client.log_dict(self.run_id, dict(t.config), "config.json")
            t.remember(self.name, str(self.run_id))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        named = [
            self.entities.Metric(UNNAMEABLE.sub("_", key), value, now, step)
            for key, value in metrics.items()
        ]
        self.client.log_batch(self.run_id, metrics=named)

    def finish(self, summary: Mapping[str, Any], samples: Sampled) -> None:
        self.ending = ENDED.get(str(summary.get("status")), "FAILED")
        self.client.log_dict(self.run_id, dict(summary), "summary.json")
        if samples:
            table = {"columns": list(COLUMNS), "data": rows_of(samples)}
            # the form of MLflow's own tables
            self.client.log_dict(self.run_id, table, "samples.json")

    def close(self) -> None:
        self.client.set_terminated(self.run_id, self.ending)


class Trackio:
    """A `Sink`: trackio."""

    name = "trackio"

    def __init__(self, target: TrackerRun):
        self.target, self.module = target, _need("trackio", self.name)

    def open(self) -> None:
        t = self.target
        identity = t.identity(self.name) or f"{t.run_dir.name}-{secrets.token_hex(3)}"
        t.remember(self.name, identity)
        self.run = self.module.init(
            project=t.project, name=identity, config=dict(t.config), resume="allow"
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def finish(self, summary: Mapping[str, Any], samples: Sampled) -> None:
        step = int(summary.get("steps") or 0)
        if samples:
            frame = _need("pandas", self.name).DataFrame(rows_of(samples), columns=list(COLUMNS))
            self.run.log({"samples": self.module.Table(dataframe=frame)}, step=step)
        self.run.log({"summary": self.module.Markdown(fenced(summary))}, step=step)

    def close(self) -> None:
        self.run.finish()


SINKS: dict[str, Callable[[TrackerRun], Sink]] = {
    sink.name: sink for sink in (TensorBoard, Wandb, Mlflow, Trackio)
}


def make_sinks(names: Sequence[str], target: TrackerRun) -> list[Sink]:
    """The trackers named in run.log.sinks.

    A missing package is an error now; an unreachable server only later, as an event.
    """
    for name in names:
        if name not in SINKS:
            raise InputError(
                f"there is no sink called {name!r}.",
                where="run.log.sinks",
                fix=f"Choose from {', '.join(SINKS)}.",
            )
    return [SINKS[name](target) for name in names]
