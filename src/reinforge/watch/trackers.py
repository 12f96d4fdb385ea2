"""The trackers: TensorBoard, Weights & Biases, MLflow, Trackio. Each is imported only when asked
for, and each shows a table of samples and keeps files in its own way.

A resumed run goes on in the tracker's own run: its id is in the run directory (`wandb.id`).
"""

from __future__ import annotations

import importlib
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from reinforge.core.errors import InputError
from reinforge.watch.prometheus import Prometheus
from reinforge.watch.sample_table import SampleTable
from reinforge.watch.sinks import Sink, TrackerRun


def _need(module: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            f"the sink {extra} needs a package that is not installed ({error}).",
            where="run.log.sinks",
            fix=f"pip install 'reinforge[{extra}]', or remove it from run.log.sinks.",
        ) from error


def unless_set(**defaults: tuple[str, Any]) -> dict[str, Any]:
    """Arguments whose environment variable is not set: `unless_set(name=("WANDB_NAME", "first"))`.
    What the environment says wins.
    """
    return {
        name: value for name, (variable, value) in defaults.items() if not os.environ.get(variable)
    }


def fenced(value: Any) -> str:
    """JSON as a block of code."""
    return f"```json\n{json.dumps(value, indent=1, default=str)}\n```"


def artifact_name(run: str, name: str) -> str:
    """What is kept of a run, by a name that W&B and trackio allow.

    >>> artifact_name("my run (2)", "record")
    'my-run--2--record'
    """
    return re.sub(r"[^A-Za-z0-9_.-]", "-", f"{run}-{name}")


class TensorBoard:
    """A `Sink`: event files in the run directory, where the files of the run are too."""

    name = "tensorboard"

    def __init__(self, target: TrackerRun):
        self.target = target
        self.module = _need("torch.utils.tensorboard", self.name)

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

    def table(self, table: SampleTable) -> None:
        self.writer.add_text(table.name, table.markdown(), table.step)

    def keep(self, name: str, paths: Sequence[Path]) -> None:
        """Nothing: they are beside its own files already."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.writer.add_text("summary", fenced(summary), int(summary.get("steps") or 0))

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """A `Sink`: Weights & Biases. Files are an artifact of the run."""

    name = "wandb"

    def __init__(self, target: TrackerRun):
        self.target = target
        self.module = _need("wandb", self.name)

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

    def table(self, table: SampleTable) -> None:
        shown = self.module.Table(columns=table.columns, data=table.rows)
        self.run.log({table.name: shown}, step=table.step)

    def keep(self, name: str, paths: Sequence[Path]) -> None:
        artifact = self.module.Artifact(artifact_name(self.run.id, name), type=name)
        for path in paths:
            if path.is_dir():
                artifact.add_dir(str(path), name=path.name)
            else:
                artifact.add_file(str(path))
        self.run.log_artifact(artifact)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.run.summary.update(
            {name: value for name, value in summary.items() if name != "metrics"}
        )

    def close(self) -> None:
        self.run.finish()


# what the name of a metric may not have in MLflow: eval/pass@4
UNNAMEABLE = re.compile(r"[^\w\-. :/]")
# in MLflow's words; everything else failed
ENDED = {"finished": "FINISHED", "terminated": "KILLED"}
# where MLflow looks for the tables of a run, and how many fit in a tag
TABLES_TAG = "mlflow.loggedArtifacts"
TABLES = 80


class Mlflow:
    """A `Sink`: MLflow, through the client: the module's functions keep their active run per
    thread. A table is a file of its step, in the form of MLflow's own tables.
    """

    name = "mlflow"
    ending = "FINISHED"

    def __init__(self, target: TrackerRun):
        self.target = target
        self.module = _need("mlflow", self.name)
        self.entities = _need("mlflow.entities", self.name)

    def open(self) -> None:
        t = self.target
        self.client = self.module.MlflowClient()
        known = os.environ.get("MLFLOW_RUN_ID") or t.identity(self.name)
        if known is None:
            self.run_id = self._begin()
        else:
            self.run_id = known
            self.client.update_run(known, status="RUNNING")
        t.remember(self.name, self.run_id)
        self.client.log_dict(self.run_id, dict(t.config), "config.json")
        self.tables = self._known_tables()

    def _begin(self) -> str:
        t = self.target
        project = t.project if t.named else os.environ.get("MLFLOW_EXPERIMENT_NAME") or t.project
        known = self.client.get_experiment_by_name(project)
        experiment = known.experiment_id if known else self.client.create_experiment(project)
        name = os.environ.get("MLFLOW_RUN_NAME") or t.run_dir.name
        return str(self.client.create_run(experiment, run_name=name).info.run_id)

    def _known_tables(self) -> list[dict[str, str]]:
        tags = self.client.get_run(self.run_id).data.tags
        return list(json.loads(tags.get(TABLES_TAG, "[]")))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        named = [
            self.entities.Metric(UNNAMEABLE.sub("_", key), value, now, step)
            for key, value in metrics.items()
        ]
        self.client.log_batch(self.run_id, metrics=named)

    def table(self, table: SampleTable) -> None:
        file = f"{table.name}/step_{table.step:06d}.json"
        value = {"columns": table.columns, "data": table.rows}
        self.client.log_dict(self.run_id, value, file)
        entry = {"path": file, "type": "table"}
        if entry not in self.tables:
            self.tables = [*self.tables, entry][-TABLES:]
            self.client.set_tag(self.run_id, TABLES_TAG, json.dumps(self.tables))

    def keep(self, name: str, paths: Sequence[Path]) -> None:
        for path in paths:
            if path.is_dir():
                self.client.log_artifacts(self.run_id, str(path), f"{name}/{path.name}")
            else:
                self.client.log_artifact(self.run_id, str(path))

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.ending = ENDED.get(str(summary.get("status")), "FAILED")
        self.client.log_dict(self.run_id, dict(summary), "summary.json")

    def close(self) -> None:
        self.client.set_terminated(self.run_id, self.ending)


class Trackio:
    """A `Sink`: trackio. Files are an artifact of the project, named after the run."""

    name = "trackio"

    def __init__(self, target: TrackerRun):
        self.target = target
        self.module = _need("trackio", self.name)

    def open(self) -> None:
        t = self.target
        identity = t.identity(self.name) or f"{t.run_dir.name}-{secrets.token_hex(3)}"
        t.remember(self.name, identity)
        self.run = self.module.init(
            project=t.project, name=identity, config=dict(t.config), resume="allow"
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def table(self, table: SampleTable) -> None:
        rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
        self.run.log({table.name: self.module.Table(data=rows)}, step=table.step)

    def keep(self, name: str, paths: Sequence[Path]) -> None:
        artifact = self.module.Artifact(artifact_name(self.run.name, name), type=name)
        for path in paths:
            if path.is_dir():
                artifact.add_dir(path, name=path.name)
            else:
                artifact.add_file(path)
        self.run.log_artifact(artifact)

    def finish(self, summary: Mapping[str, Any]) -> None:
        text = self.module.Markdown(fenced(summary))
        self.run.log({"summary": text}, step=int(summary.get("steps") or 0))

    def close(self) -> None:
        self.run.finish()


SINKS: dict[str, Callable[[TrackerRun], Sink]] = {
    sink.name: sink for sink in (TensorBoard, Wandb, Mlflow, Trackio, Prometheus)
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
