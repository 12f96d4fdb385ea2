"""The trackers, each with the real package: what it holds afterwards, whose settings win, and what
is said when one fails.

A tracker keeps much in its process (settings read at import, a service): each case is a process of
its own.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.paths import SRC
from helpers.tiny_runs import DATA, lines, odd
from helpers.toys import SilentView
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.run import train_config
from reinforge.config.schema import Config
from reinforge.core.errors import Terminated
from reinforge.loops.run import Run
from reinforge.watch import sinks, trackers
from reinforge.watch.recorder import Recorder
from reinforge.watch.report import write_report
from reinforge.watch.runs import show_run

pytestmark = pytest.mark.timeout(300)
PROGRAM = """
import shutil
import sys
from pathlib import Path
from reinforge.core.sample import Group, Row, Sample
from reinforge.watch import sinks, trackers
from reinforge.watch.recorder import Recorder

sinks.CLOSE_SECONDS = 240.0  # the machine may be busy
name, folder, project, resumed = sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4:]
config = {"model": {"path": "org/name"}, "train": {"steps": 3}}
kept = int(resumed[0]) if resumed else None
target = sinks.TrackerRun(folder, config, project, kept, named=project != "reinforge")
made = trackers.make_sinks([name], target)
recorder = Recorder(folder, config, made, {} if resumed else None, steps=3)
checkpoint = folder / "checkpoints" / "step-00000003"
checkpoint.mkdir(parents=True)
(checkpoint / "weights").write_text(f"weights {kept}")
scores = {"exact": 1.0, "short": None}
samples = [
    Sample.from_tokens("u", [1, 2], [False, True], reward=0.5, rewards=scores),
    Sample.from_tokens("v", [1, 2, 3], [False, True, True], reward=float("nan")),
]
group = Group(Row("r", "2|2=`"), samples, ["four\\nor 4", "5"])
spread = {"mean": -0.25, "min": -0.5, "max": 0.0, "first": -0.5, "last": 0.0}
training = {"u": {"advantage": 0.75}, "v": {"advantage": spread}}
for step in (3, 4) if resumed else (1, 2, 3):
    recorder.log(step, {"reward/mean": step / 4, "eval/pass@4": 0.5})
    if step in (1, 3):
        recorder.samples(step, [group], 2, training=training)
recorder.samples(step, [group], 1, evaluation=True)
recorder.keep_checkpoint(checkpoint)
shutil.rmtree(checkpoint)  # as if it had been pruned
(folder / "report.html").write_text("<p>the report</p>")
end = {"status": "finished", "steps": step, "metrics": {"reward/mean": 0.75}, "troubles": []}
recorder.finish(end, keep=True)
recorder.close()
assert not (folder / ".handover").exists()
"""
COLUMNS = ["step", "prompt", "completion", "reward", "reward/exact", "reward/short"]
COLUMNS += ["advantage", "stop", "length"]


def table_of(step: int) -> list[list[Any]]:
    """The rows that a tracker has to hold of a step."""
    return [
        [step, "2|2=`", "four\nor 4", 0.5, 1.0, None, 0.75, "eos", 1],
        [step, "2|2=`", "5", None, None, None, -0.25, "eos", 2],
    ]


def tracked(
    name: str,
    folder: Path,
    project: str = "reinforge",
    resumed: tuple[str, ...] = (),
    **environment: str,
) -> list[str]:
    """Logs a run of three steps to the tracker, in its own process; what it says of failed
    trackers. `resumed`: the step after which the same run goes on, to step 4.
    """
    outside = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("WANDB_", "MLFLOW_", "TRACKIO_"))
    }
    quiet = {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "WANDB_ERROR_REPORTING": "false",
        "PYTHONPATH": str(SRC),
    }
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, name, str(folder), project, *resumed],
        cwd=folder,
        env={**outside, **quiet, **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event["error"] for event in events if event["kind"] == "sink_failed"]


def test_tensorboard_holds_numbers_config_summary_and_samples(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert tracked("tensorboard", tmp_path) == []
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(e.step, e.value) for e in read.Scalars("reward/mean")] == [
        (1, 0.25),
        (2, 0.5),
        (3, 0.75),
    ]

    def text(name: str) -> str:
        return read.Tensors(f"{name}/text_summary")[0].tensor_proto.string_val[0].decode()

    assert '"org/name"' in text("config") and '"finished"' in text("summary")
    assert text("samples").splitlines() == [
        "| step | prompt | completion | reward | stop | length |",
        "| --- | --- | --- | --- | --- | --- |",
        "| 3 | `2\\|2='` | `four ⏎ or 4` | 0.5 | `eos` | 1 |",
    ]


def wandb_records(folder: Path) -> list[Any]:
    """What an offline run has written, record by record."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    [file] = folder.glob("wandb/offline-run-*/run-*.wandb")
    store = DataStore()
    found = []
    store.open_for_scan(str(file))
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        found.append(record)
    return found


def test_wandb_holds_numbers_config_summary_and_samples(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    assert tracked("wandb", tmp_path / "first", WANDB_MODE="offline") == []
    records = wandb_records(tmp_path / "first")
    [run] = [r.run for r in records if r.WhichOneof("record_type") == "run"]
    assert (run.project, run.display_name) == ("reinforge", "first")
    assert {item.key: json.loads(item.value_json) for item in run.config.update}["model"] == {
        "path": "org/name"
    }
    history = [
        {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in r.history.item}
        for r in records
        if r.HasField("history")
    ]
    assert [(h["_step"], h["reward/mean"]) for h in history if "reward/mean" in h] == [
        (1, 0.25),
        (2, 0.5),
        (3, 0.75),
    ]
    [table] = list(
        (tmp_path / "first").glob("wandb/offline-run-*/files/media/table/samples_*.table.json")
    )
    assert json.loads(table.read_text())["data"] == [[3, "2|2=`", "four\nor 4", 0.5, "eos", 1]]
    assert b"finished" in b"".join(r.SerializeToString() for r in records if r.HasField("summary"))


def test_the_environment_of_wandb_wins_over_our_defaults_and_not_over_the_config(
    tmp_path: Path,
) -> None:
    pytest.importorskip("wandb")
    theirs = {
        "WANDB_MODE": "offline",
        "WANDB_PROJECT": "theirs",
        "WANDB_NAME": "named",
        "WANDB_RUN_ID": "abc123",
        "WANDB_DIR": str(tmp_path / "there"),
    }
    (tmp_path / "there").mkdir()
    assert tracked("wandb", tmp_path / "run", **theirs) == []
    assert (
        not (tmp_path / "run" / "wandb").exists()
        and (tmp_path / "run" / "wandb.id").read_text() == "abc123"
    )
    [run] = [
        r.run for r in wandb_records(tmp_path / "there") if r.WhichOneof("record_type") == "run"
    ]
    assert (run.project, run.display_name, run.run_id) == ("theirs", "named", "abc123")
    assert (
        tracked("wandb", tmp_path / "chosen", "ours", WANDB_MODE="offline", WANDB_PROJECT="theirs")
        == []
    )
    [run] = [
        r.run for r in wandb_records(tmp_path / "chosen") if r.WhichOneof("record_type") == "run"
    ]
    assert run.project == "ours", "run.log.project was set: it is not a default"


def mlflow_run(uri: str, project: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name(project)
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    return client, run


@pytest.mark.parametrize("store", [pytest.param("sqlite", marks=pytest.mark.long), "file"])
def test_mlflow_holds_numbers_config_summary_and_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str
) -> None:
    """With a database, MLflow's default, and with files, which it wants to be allowed."""
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    uri = f"sqlite:///{tmp_path / 'ml.db'}" if store == "sqlite" else (tmp_path / "mlruns").as_uri()
    assert (
        tracked(
            "mlflow", tmp_path / "first", MLFLOW_TRACKING_URI=uri, MLFLOW_ALLOW_FILE_STORE="true"
        )
        == []
    )
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    client, run = mlflow_run(uri, "reinforge", monkeypatch)
    assert run.info.run_name == "first" and run.info.status == "FINISHED"
    values = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(m.step, m.value) for m in values] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert run.data.metrics["eval/pass_4"] == 0.5, "MLflow allows no @ in a name"
    monkeypatch.chdir(tmp_path / "first")
    assert sorted(file.path for file in client.list_artifacts(run.info.run_id)) == [
        "config.json",
        "samples.json",
        "summary.json",
    ]
    samples = Path(client.download_artifacts(run.info.run_id, "samples.json", str(tmp_path)))
    assert json.loads(samples.read_text())["data"] == [[3, "2|2=`", "four\nor 4", 0.5, "eos", 1]]


def test_the_environment_of_mlflow_wins_over_our_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    uri = (tmp_path / "mlruns").as_uri()
    theirs = {
        "MLFLOW_EXPERIMENT_NAME": "theirs",
        "MLFLOW_RUN_NAME": "named",
        "MLFLOW_TRACKING_URI": uri,
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }
    assert tracked("mlflow", tmp_path / "run", **theirs) == []
    assert mlflow_run(uri, "theirs", monkeypatch)[1].info.run_name == "named"


def test_trackio_holds_numbers_config_summary_and_samples(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    assert tracked("trackio", tmp_path / "first", TRACKIO_DIR=str(tmp_path / "there")) == []
    database = sqlite3.connect(tmp_path / "there" / "reinforge.db")
    logged = [
        (step, json.loads(text))
        for step, text in database.execute("select step, metrics from metrics order by id")
    ]
    database.close()
    assert [(step, m["reward/mean"]) for step, m in logged if "reward/mean" in m] == [
        (1, 0.25),
        (2, 0.5),
        (3, 0.75),
    ]
    others = {name for _, m in logged for name in m}
    assert {"samples", "summary"} <= others and "four" in json.dumps(
        [m for _, m in logged if "samples" in m]
    )


# one that fails


class Down:
    """A tracker whose server is not there."""

    name = "down"

    def __init__(self, target: sinks.TrackerRun):
        self.target = target

    def open(self) -> None:
        raise ConnectionError("no route to the tracker")

    def log(self, step: int, metrics: Any) -> None: ...
    def table(self, table: Any) -> None: ...
    def keep(self, name: str, paths: Any) -> None: ...
    def finish(self, summary: Any) -> None: ...
    def close(self) -> None: ...


def test_a_tracker_that_fails_is_told_on_the_screen_and_in_the_summary_and_the_run_goes_on(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(trackers.SINKS, "tensorboard", Down)
    cfg = make("run", "grpo", "run.log.sinks=[tensorboard]")
    view = SilentView()
    result = train_config(cfg, CallerObjects(data=DATA, rewards=[odd]), view)
    words = "down takes no metrics any more: ConnectionError: no route to the tracker"
    assert (
        result.steps == 3
        and [t.what for t in view.found] == [words]
        and f"warning: {words}" in view.messages[-1]
    )
    summary = json.loads((result.run_dir / "summary.json").read_text())
    assert [t["what"] for t in summary["troubles"]] == [words]
    assert (
        words in show_run(result.run_dir)["troubles"][0]
        and words in write_report(result.run_dir).read_text()
    )
    assert [e["sink"] for e in lines(cfg, "events.jsonl") if e["kind"] == "sink_failed"] == ["down"]


def test_a_tracker_that_hangs_holds_up_neither_the_summary_nor_a_run_that_was_asked_to_end(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asks a run to end may kill it soon: what it tells is on disk before any tracker is waited
    for.
    """
    before: list[tuple[str, bool]] = []
    given: list[float | None] = []
    release = threading.Event()

    class Hanging(Down):
        name = "hanging"

        def open(self) -> None:
            release.wait()

    close = Recorder.close

    def closing(self: Recorder, seconds: float | None = None) -> None:
        status = json.loads((self.run_dir / "summary.json").read_text())["status"]
        before.append((status, (self.run_dir / "report.html").exists()))
        given.append(seconds)
        close(self, 0.1)

    end_step = Run.end_step

    async def asked(self: Run, *metrics: Any) -> None:
        if self.dir.name == "cut":
            self.terminate(signal.SIGTERM)
        await end_step(self, *metrics)

    monkeypatch.setitem(trackers.SINKS, "tensorboard", Hanging)
    monkeypatch.setattr(Recorder, "close", closing)
    monkeypatch.setattr(Run, "end_step", asked)
    words = ["hanging takes no metrics any more: it did not close in time"]
    for name, status, seconds in (
        ("whole", "finished", None),
        ("cut", "terminated", sinks.HURRIED_SECONDS),
    ):
        cfg = make(name, "grpo", "run.log.sinks=[tensorboard]")
        try:
            train_config(cfg, CallerObjects(data=DATA, rewards=[odd]), SilentView())
        except Terminated:
            assert name == "cut"
        assert (before.pop(), given.pop()) == ((status, True), seconds)
        summary = json.loads((Path(cfg.run.dir) / "summary.json").read_text())
        assert [
            trouble["what"] for trouble in summary["troubles"]
        ] == words and sinks.HURRIED_SECONDS < 30
        assert words[0] in (Path(cfg.run.dir) / "report.html").read_text()
    release.set()


def test_trackers_get_the_config_without_its_secrets(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    class Seeing(Down):
        def open(self) -> None:
            seen.append(self.target.config)

        def finish(self, summary: Any, samples: Any) -> None:
            seen.append((summary, samples))

    monkeypatch.setitem(trackers.SINKS, "tensorboard", Seeing)
    reward = {"name": "helpers.toy_rewards:odd", "options": {"api_key": "sk-secret"}}
    cfg = make("run", "grpo", "run.log.sinks=[tensorboard]", rewards=[reward])
    train_config(
        cfg, CallerObjects(data=DATA, functions={"helpers.toy_rewards:odd": odd}), SilentView()
    )
    assert "sk-secret" not in json.dumps(seen[0]) and seen[0]["model"]["path"] == cfg.model.path
    summary, samples = seen[1]
    assert (
        summary["status"] == "finished"
        and summary["metrics"]["train/grad_norm"] > 0
        and samples[0]["completion"] is not None
    )
