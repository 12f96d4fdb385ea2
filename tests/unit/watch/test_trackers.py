"""The trackers, each with the real package: what it holds afterwards, whose settings win, and what
is said when one fails.

A tracker keeps much in its process (settings read at import, a service): each case is a process of
its own.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
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
from reinforge.watch.prometheus import Prometheus
from reinforge.watch.recorder import Recorder
from reinforge.watch.report import write_report
from reinforge.watch.runs import show_run
from reinforge.watch.sample_table import SampleTable

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
recorder.keep_checkpoint(checkpoint, {name})
shutil.rmtree(checkpoint)  # as if it had been pruned
(folder / "report.html").write_text("<p>the report</p>")
end = {"status": "finished", "steps": step, "metrics": {"reward/mean": 0.75}, "troubles": []}
recorder.finish(end, {name})
recorder.close()
assert not (folder / ".handover").exists()
"""
CURVE = [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]
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
        "WANDB_DATA_DIR": str(folder / "staged"),
        "WANDB_CACHE_DIR": str(folder / "cached"),
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
    """Of a resumed run too: the numbers of a step that was done again are there once."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert tracked("tensorboard", tmp_path) == []
    assert tracked("tensorboard", tmp_path, resumed=("2",)) == []
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(e.step, e.value) for e in read.Scalars("reward/mean")] == CURVE

    def texts(name: str) -> dict[int, str]:
        found = read.Tensors(f"{name}/text_summary")
        return {e.step: e.tensor_proto.string_val[0].decode() for e in found}

    assert '"org/name"' in texts("config")[0] and '"finished"' in texts("summary")[4]
    samples = texts("samples")
    assert list(samples) == [1, 3] and list(texts("eval/samples")) == [3, 4]
    assert samples[3].splitlines() == [
        "| " + " | ".join(COLUMNS) + " |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        "| 3 | `2\\|2='` | `four ⏎ or 4` | 0.5 | 1.0 |  | 0.75 | `eos` | 1 |",
        "| 3 | `2\\|2='` | `5` |  |  |  | -0.25 | `eos` | 2 |",
    ]


def wandb_records(folder: Path) -> list[list[Any]]:
    """What offline runs have written, record by record, in the order of their starts."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    starts = []
    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        store = DataStore()
        found = []
        store.open_for_scan(str(file))
        while (data := store.scan_data()) is not None:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            found.append(record)
        starts.append(found)
    return starts


def wandb_history(records: list[Any]) -> list[dict[str, Any]]:
    return [
        {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in r.history.item}
        for r in records
        if r.HasField("history")
    ]


def wandb_run(records: list[Any]) -> Any:
    [run] = [r.run for r in records if r.WhichOneof("record_type") == "run"]
    return run


def test_wandb_holds_numbers_config_summary_samples_and_files(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    assert tracked("wandb", tmp_path / "first", WANDB_MODE="offline") == []
    [records] = wandb_records(tmp_path / "first")
    run = wandb_run(records)
    assert (run.project, run.display_name) == ("reinforge", "first")
    assert {item.key: json.loads(item.value_json) for item in run.config.update}["model"] == {
        "path": "org/name"
    }
    history = wandb_history(records)
    numbers = [(h["_step"], h["reward/mean"]) for h in history if "reward/mean" in h]
    assert numbers == CURVE[:3]
    [files] = (tmp_path / "first").glob("wandb/offline-run-*/files")
    shown = [h for h in history if h.get("samples/_type") == "table-file"]
    assert [h["_step"] for h in shown] == [1, 3]
    for step, media in zip((1, 3), shown, strict=True):
        table = json.loads((files / media["samples/path"]).read_text())
        assert (table["columns"], table["data"]) == (COLUMNS, table_of(step))
    [path] = [h["eval/samples/path"] for h in history if "eval/samples/path" in h]
    [row] = json.loads((files / path).read_text())["data"]
    assert row[:4] == [3, "2|2=`", "four\nor 4", 0.5]
    kept = {
        r.artifact.name: {entry.path: entry.local_path for entry in r.artifact.manifest.contents}
        for r in records
        if r.HasField("artifact")
    }
    record = kept[f"{run.run_id}-record"]
    assert list(record) == ["config.json", "report.html", "versions.json"]
    assert Path(record["report.html"]).read_text() == "<p>the report</p>"
    weights = kept[f"{run.run_id}-checkpoint"]["step-00000003/weights"]
    assert Path(weights).read_text() == "weights None"
    assert b"finished" in b"".join(r.SerializeToString() for r in records if r.HasField("summary"))


def test_a_resumed_run_goes_on_in_the_same_run_of_wandb(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    for resumed in ((), ("2",)):
        assert tracked("wandb", tmp_path / "first", resumed=resumed, WANDB_MODE="offline") == []
    first, second = wandb_records(tmp_path / "first")
    assert wandb_run(first).run_id == wandb_run(second).run_id
    assert wandb_run(second).run_id == (tmp_path / "first" / "wandb.id").read_text()
    again = [(h["_step"], h["reward/mean"]) for h in wandb_history(second) if "reward/mean" in h]
    assert again == CURVE[2:]


@pytest.mark.long
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
    [records] = wandb_records(tmp_path / "there")
    run = wandb_run(records)
    assert (run.project, run.display_name, run.run_id) == ("theirs", "named", "abc123")
    assert (
        tracked("wandb", tmp_path / "chosen", "ours", WANDB_MODE="offline", WANDB_PROJECT="theirs")
        == []
    )
    [records] = wandb_records(tmp_path / "chosen")
    assert wandb_run(records).project == "ours", "run.log.project was set: it is not a default"


def mlflow_run(uri: str, project: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name(project)
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    return client, run


@pytest.mark.parametrize("store", [pytest.param("sqlite", marks=pytest.mark.long), "file"])
def test_mlflow_holds_numbers_config_summary_samples_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str
) -> None:
    """With a database, MLflow's default, and with files, which it wants to be allowed. A resumed
    run goes on in the same run of MLflow.
    """
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    uri = f"sqlite:///{tmp_path / 'ml.db'}" if store == "sqlite" else (tmp_path / "mlruns").as_uri()
    theirs = {"MLFLOW_TRACKING_URI": uri, "MLFLOW_ALLOW_FILE_STORE": "true"}
    for resumed in ((), ("2",)):
        assert tracked("mlflow", tmp_path / "first", resumed=resumed, **theirs) == []
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    client, run = mlflow_run(uri, "reinforge", monkeypatch)
    assert run.info.run_name == "first" and run.info.status == "FINISHED"
    values = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(m.step, m.value) for m in values] == [*CURVE[:3], *CURVE[2:]]
    assert run.data.metrics["eval/pass_4"] == 0.5, "MLflow allows no @ in a name"
    monkeypatch.chdir(tmp_path / "first")

    def files(folder: str | None = None) -> list[str]:
        return sorted(f.path for f in client.list_artifacts(run.info.run_id, folder))

    def content(file: str) -> str:
        return Path(client.download_artifacts(run.info.run_id, file, str(tmp_path))).read_text()

    assert [name for name in files() if "." in name] == [
        "config.json",
        "report.html",
        "summary.json",
        "versions.json",
    ]
    assert content("report.html") == "<p>the report</p>"
    assert content("checkpoint/step-00000003/weights") == "weights 2"
    tables = ["samples/step_000001.json", "samples/step_000003.json"]
    assert files("samples") == tables
    for step, file in zip((1, 3), tables, strict=True):
        table = json.loads(content(file))
        assert (table["columns"], table["data"]) == (COLUMNS, table_of(step))
    listed = json.loads(run.data.tags["mlflow.loggedArtifacts"])
    assert [entry["path"] for entry in listed] == [
        *tables,
        "eval/samples/step_000003.json",
        "eval/samples/step_000004.json",
    ], "where MLflow itself looks for tables"


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


def test_trackio_holds_numbers_config_summary_samples_and_files(tmp_path: Path) -> None:
    """A resumed run goes on in the same run of trackio."""
    pytest.importorskip("trackio")
    there = tmp_path / "there"
    for resumed in ((), ("2",)):
        folder = tmp_path / "first (1)"
        assert tracked("trackio", folder, resumed=resumed, TRACKIO_DIR=str(there)) == []
    database = sqlite3.connect(there / "reinforge.db")
    logged = [
        (step, json.loads(text))
        for step, text in database.execute("select step, metrics from metrics order by id")
    ]
    runs = database.execute("select distinct run_name, run_id from metrics").fetchall()
    kept = {
        name: {entry["path"]: entry["digest"] for entry in json.loads(manifest)}
        for name, manifest in database.execute(
            "select name, manifest from artifacts join artifact_versions"
            " on artifact_id = artifacts.id order by version"
        )
    }
    database.close()
    [(name, _)] = runs
    assert name == (tmp_path / "first (1)" / "trackio.id").read_text()
    numbers = [(step, m["reward/mean"]) for step, m in logged if "reward/mean" in m]
    assert numbers == [*CURVE[:3], *CURVE[2:]]
    tables = {step: m["samples"] for step, m in logged if "samples" in m}
    assert list(tables) == [1, 3]
    for step, table in tables.items():
        assert table["_type"] == "trackio.table"
        assert [list(row) for row in table["_value"]] == [COLUMNS, COLUMNS]
        assert [list(row.values()) for row in table["_value"]] == table_of(step)
    assert [step for step, m in logged if "eval/samples" in m] == [3, 4]
    assert all("finished" in m["summary"]["_value"] for _, m in logged if "summary" in m)

    def content(digest: str) -> str:
        [blob] = there.glob(f"artifacts/reinforge/blobs/sha256/*/{digest}")
        return blob.read_text()

    record, checkpoint = (
        kept[trackers.artifact_name(name, what)] for what in ("record", "checkpoint")
    )
    assert content(record["report.html"]) == "<p>the report</p>"
    assert content(checkpoint["step-00000003/weights"]) == "weights 2", "the newest version"


def test_prometheus_reads_the_newest_metrics_while_the_run_goes(tmp_path: Path) -> None:
    sink = Prometheus(sinks.TrackerRun(tmp_path / "first", {}, "p"))
    recorder = Recorder(tmp_path / "first", {}, [sink])
    for step in (1, 2):
        recorder.log(step, {"reward/mean": step / 4, "bad": float("nan")})
    recorder.log(2, {"eval/pass@4": 0.5})
    deadline = time.monotonic() + 60
    while "eval" not in str(sink.metrics) and time.monotonic() < deadline:
        time.sleep(0.01)
    port = sink.server.server_port
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        values = [line for line in answer.read().decode().splitlines() if line[0] != "#"]
    assert values == [
        'reinforge_step{run="first"} 2.0',
        'reinforge_reward_mean{run="first"} 0.5',
        'reinforge_eval_pass_4{run="first"} 0.5',
    ]
    recorder.close()
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5)


def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    told: list[tuple[str, str]] = []
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        target = sinks.TrackerRun(tmp_path, {}, "p", address=address)
        made = trackers.make_sinks(["prometheus"], target)
        recorder = Recorder(tmp_path, {}, made, sink_failed=lambda *said: told.append(said))
        recorder.close()
    [(name, error)] = told
    assert name == "prometheus" and f"run.log.prometheus={address}" in error
    assert "Address already in use" in error


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


def test_trackers_get_the_config_without_its_secrets_tables_with_advantages_and_checkpoints(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    tables: list[SampleTable] = []
    kept: list[tuple[str, list[str]]] = []

    class Seeing(Down):
        def open(self) -> None:
            seen.append(self.target.config)

        def table(self, table: Any) -> None:
            tables.append(table)

        def keep(self, name: str, paths: Any) -> None:
            kept.append((name, [path.name for path in paths]))

        def finish(self, summary: Any) -> None:
            seen.append(summary)

    monkeypatch.setitem(trackers.SINKS, "tensorboard", Seeing)
    reward = {"name": "helpers.toy_rewards:odd", "options": {"api_key": "sk-secret"}}
    settings = ["run.log.sinks=[tensorboard]", "run.log.artifacts=checkpoints"]
    settings += ["run.log.samples_every=2", "run.checkpoint.every=1", "run.checkpoint.keep=1"]
    cfg = make("run", "grpo", *settings, rewards=[reward])
    train_config(
        cfg, CallerObjects(data=DATA, functions={"helpers.toy_rewards:odd": odd}), SilentView()
    )
    assert "sk-secret" not in json.dumps(seen[0]) and seen[0]["model"]["path"] == cfg.model.path
    summary = seen[1]
    assert summary["status"] == "finished" and summary["metrics"]["train/grad_norm"] > 0
    assert [(table.name, table.step) for table in tables] == [("samples", 1), ("samples", 3)]
    place = tables[0].columns.index("advantage")
    shown = [row[place] for table in tables for row in table.rows]
    recorded = [line["training"].get("advantage") for line in lines(cfg, "samples.jsonl")]
    assert shown == recorded and any(shown)
    steps = [f"step-{step:08d}" for step in (1, 2, 3)]
    record = ["config.json", "versions.json", "summary.json", "report.html"]
    assert kept == [*(("checkpoint", [step]) for step in steps), ("record", record)]
