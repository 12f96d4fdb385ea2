"""The run's record, its sinks, timings, terminal view and listings."""

from __future__ import annotations

import importlib.metadata
import io
import json
import logging
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

from helpers.paths import SRC
from reinforge.core.errors import InputError
from reinforge.core.redact import redact, redact_settings
from reinforge.core.sample import Group, Row, Sample, Stop
from reinforge.core.visible import visible
from reinforge.watch import sinks, trackers
from reinforge.watch.doctor.trouble import Trouble
from reinforge.watch.memory_usage import device_peak, process_peak
from reinforge.watch.recorder import Recorder, note, pick
from reinforge.watch.report import write_report
from reinforge.watch.runs import compare_runs, flatten, list_runs, show_run
from reinforge.watch.timing import PhaseTimer
from reinforge.watch.view import View


def group(
    name: str, texts: list[str], rewards: list[float | None], prompt: str | list = "2+2="
) -> Group:
    samples = [
        Sample.from_tokens(
            f"{name}/{i}",
            [5, 6, 7, 8],
            [False, False, True, True],
            group=name,
            reward=r,
            rewards={"exact": r},
            stop=Stop.LENGTH,
        )
        for i, r in enumerate(rewards)
    ]
    return Group(Row(name, prompt), samples, texts)


def lines(path: Path) -> list[dict]:
    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_metrics_are_strict_json_and_nonfinite_values_are_named(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, {"train": {"steps": 3}})
    recorder.log(
        1,
        {
            "reward/mean": 0.25,
            "train/loss": math.nan,
            "policy/kl": math.inf,
            "tensor": torch.tensor(2.5),
        },
    )
    first = lines(tmp_path / "metrics.jsonl")[0]  # readable at once, without close
    assert first["step"] == 1 and first["reward/mean"] == 0.25 and first["tensor"] == 2.5
    assert (
        first["train/loss"] is None
        and first["policy/kl"] is None
        and first["nonfinite"] == ["train/loss", "policy/kl"]
    )
    recorder.log(2, {"reward/mean": 0.5})
    assert "nonfinite" not in lines(tmp_path / "metrics.jsonl")[1]
    recorder.event("skipped_step", step=2, grad_norm=math.nan)
    events = lines(tmp_path / "events.jsonl")
    assert [e["kind"] for e in events] == ["started", "skipped_step"] and events[1][
        "grad_norm"
    ] == "nan"
    assert json.loads((tmp_path / "config.json").read_text()) == {"train": {"steps": 3}}
    assert json.loads((tmp_path / "versions.json").read_text())[
        "torch"
    ] == importlib.metadata.version("torch")
    recorder.close()


def test_resume_cuts_the_logs_back_so_that_redone_steps_are_not_doubled(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, {})
    for step in (1, 2):
        recorder.log(step, {"reward/mean": float(step)})
        recorder.samples(step, [group("a", ["x"], [1.0])], 1)
    offsets = recorder.offsets()
    assert offsets["metrics.jsonl"] == (tmp_path / "metrics.jsonl").stat().st_size
    for step in (3, 4):
        recorder.log(step, {"reward/mean": 99.0})
        recorder.samples(step, [group("a", ["x"], [1.0])], 1)
    recorder._files["metrics.jsonl"].write(b'{"step": 5, "rew')  # killed in the middle of a line
    recorder.close()
    resumed = Recorder(tmp_path, {}, resume_offsets=offsets)
    assert resumed.offsets()["metrics.jsonl"] == offsets["metrics.jsonl"]
    for step in (3, 4):
        resumed.log(step, {"reward/mean": float(step)})
    resumed.close()
    assert [(x["step"], x["reward/mean"]) for x in lines(tmp_path / "metrics.jsonl")] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
        (4, 4.0),
    ]
    assert [x["step"] for x in lines(tmp_path / "samples.jsonl")] == [1, 2]
    events = lines(tmp_path / "events.jsonl")
    assert [e["kind"] for e in events] == ["started", "resumed"] and events[1]["dropped_bytes"][
        "metrics.jsonl"
    ] > 0


def test_events_and_metrics_reach_pythons_logging(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A program around ours can follow a run without reading its files; on the terminal nothing of
    it is shown.
    """
    assert (
        not logging.getLogger("reinforge").handlers
        and logging.getLogger("reinforge.events").getEffectiveLevel() >= logging.WARNING
    )
    with caplog.at_level(logging.DEBUG, logger="reinforge"):
        recorder = Recorder(tmp_path, {})
        recorder.log(3, {"a": 1.5})
        recorder.event("checkpoint", step=3, url="http://me:PW@host")
        recorder.close()
    metrics = [r for r in caplog.records if r.name == "reinforge.metrics"]
    events = [r for r in caplog.records if r.name == "reinforge.events"]
    assert [(r.levelno, r.step, r.metrics) for r in metrics] == [(logging.DEBUG, 3, {"a": 1.5})]
    assert [r.kind for r in events] == [line["kind"] for line in lines(tmp_path / "events.jsonl")]
    last = events[-1]
    assert (last.levelno, last.run_dir, last.fields) == (
        logging.INFO,
        str(tmp_path),
        {"step": 3, "url": "http://(hidden)@host"},
    )


def test_offsets_cover_what_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint promises that its logs reach to these offsets, also after a power cut: they are
    synced before they are told.
    """
    recorder = Recorder(tmp_path, {})
    recorder.log(1, {"a": 1.0})
    fsync = os.fsync
    synced = dict[str, int]()

    def listening(handle: int) -> None:
        fsync(handle)
        file = Path(os.readlink(f"/proc/self/fd/{handle}"))
        synced[file.name] = file.stat().st_size

    monkeypatch.setattr(os, "fsync", listening)
    assert recorder.offsets() == synced and synced["metrics.jsonl"] > 0
    recorder.close()


def test_resume_with_a_log_shorter_than_its_offset_ends_on_a_whole_line(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, {})
    recorder.log(1, {"a": 1.0})
    recorder.log(2, {"a": 2.0})
    offsets = recorder.offsets()
    recorder.close()
    os.truncate(tmp_path / "metrics.jsonl", offsets["metrics.jsonl"] - 5)
    resumed = Recorder(tmp_path, {}, resume_offsets=offsets)
    resumed.log(3, {"a": 3.0})
    resumed.close()
    assert [x["step"] for x in lines(tmp_path / "metrics.jsonl")] == [1, 3]
    assert lines(tmp_path / "events.jsonl")[-1]["dropped_bytes"]["metrics.jsonl"] == -5


def test_a_new_run_sets_logs_of_an_attempt_without_checkpoint_aside(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        recorder = Recorder(tmp_path, {})
        recorder.log(1, {"a": value})
        recorder.close()
    assert [x["a"] for x in lines(tmp_path / "metrics.jsonl")] == [2.0]
    assert [x["a"] for x in lines(tmp_path / "metrics.jsonl.previous")] == [1.0]


def test_samples_take_one_of_each_group_first_and_survive_odd_text(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    groups = [
        group("a", ["a0", "a1"], [1.0, 0.0]),
        group("b", ["\ud800\n</script>", "b1"], [None, 0.5], chat),
    ]
    assert [s.uid for _, s, _ in pick(groups, 3)] == ["a/0", "b/0", "a/1"]
    recorder = Recorder(tmp_path, {})
    recorder.samples(7, groups, 3)
    recorder.close()
    rows = lines(tmp_path / "samples.jsonl")
    assert [r["completion"] for r in rows] == ["a0", "\ud800\n</script>", "a1"]
    assert rows[1] | {"completion": ""} == {
        "step": 7,
        "row": "b",
        "uid": "b/0",
        "prompt": "user: hi",
        "completion": "",
        "reward": None,
        "components": {"exact": None},
        "stop": "length",
        "length": 2,
    }


def test_secrets_are_hidden_and_other_tokens_are_not() -> None:
    config = {
        "rollout": {"max_new_tokens": 64},
        "model": {"tokenizer": "x"},
        "judge": [{"api_key": "sk-1", "hf_token": "hf_2", "token": "t"}],
    }
    assert redact(config) == {
        "rollout": {"max_new_tokens": 64},
        "model": {"tokenizer": "x"},
        "judge": [{"api_key": "(hidden)", "hf_token": "(hidden)", "token": "(hidden)"}],
    }


def test_no_secret_is_in_any_file_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In keys, inside URLs, behind options: what a configuration, a command line, an event or the
    report of them holds.
    """
    url = "http://user:PW-1@host:8000/v1?model=m&api_key=PW-2&X-Amz-Signature=PW-3"
    argv = [
        "reinforge",
        "train",
        "run.yaml",
        "--api-key",
        "PW-4",
        "--judge-token=PW-5",
        "judge.password=PW-6",
        url,
        'judge={"api_key": "PW-7"}',
    ]
    monkeypatch.setattr(sys, "argv", argv)
    recorder = Recorder(
        tmp_path,
        {
            "judge": {"url": url, "headers": {"Authorization": "Bearer PW-8-longer"}},
            "rollout": {"max_new_tokens": 64},
        },
    )
    recorder.log(1, {"a": 1.0})
    recorder.event(
        "config_changed", changes={"judge.url": [url, None], "judge.api_key": ["PW-9", "PW-10"]}
    )
    recorder.event("failed", error=f"ConnectionError('{url} refused')")
    recorder.document("prediction.json", {"server": url})
    recorder.close()
    note(tmp_path, "damaged_checkpoint", error=url)
    write_report(tmp_path)
    found = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert {"config.json", "events.jsonl", "prediction.json", "report.html"} <= found.keys()
    for name, text in found.items():
        assert "PW-" not in text, name
    assert json.loads(found["config.json"])["rollout"] == {"max_new_tokens": 64}
    assert "http://(hidden)@host:8000/v1?model=m&api_key=(hidden)" in found["config.json"]


PROSE = [
    "You solve basic arithmetic problems.",
    'Answer as {"token": "...", "password": "guess"}.',
    "Write password=<guess> and then ?key=value.",
    "Bearer certificates are what this is about; see http://me:you@example.org/ for more.",
]


def test_prose_in_a_configuration_stays_as_it_is(tmp_path: Path) -> None:
    """Later commands read config.json back: what a prompt says of passwords is no secret."""
    settings = {
        "data": {
            "system": PROSE[0],
            "fixed": {"few": PROSE},
            "url": "db://me:PW@host/x?api_key=PW",
        },
        "engine": ["--api-key=PW", "--n=3"],
    }
    Recorder(tmp_path, settings).close()
    found = json.loads((tmp_path / "config.json").read_text())
    assert found["data"]["system"] == PROSE[0] and found["data"]["fixed"]["few"] == PROSE
    assert found["data"]["url"] == "db://(hidden)@host/x?api_key=(hidden)"
    assert found["engine"] == ["--api-key=(hidden)", "--n=3"]
    assert redact_settings(found) == found


def test_a_scheme_is_hidden_in_a_header_and_not_in_a_sentence() -> None:
    for header in (
        "Authorization: Bearer PW-1.a",
        "{'Authorization': 'Basic PW-1='}",
        '{"authorization": "Bearer PW-1"}',
        "'Bearer PW-1'",
    ):
        assert "PW-1" not in redact(f"401 for {header}"), header
    assert redact(PROSE[0]) == PROSE[0]


class Collecting:
    name = "collecting"

    def __init__(self, fail_at: int | None = None, block: threading.Event | None = None):
        self.fail_at = fail_at
        self.block = block
        self.seen = []
        self.closed = False

    def open(self) -> None:
        if self.block:
            self.block.wait()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if step == self.fail_at:
            raise ConnectionError("tracker is down")
        self.seen.append((step, dict(metrics)))

    def close(self) -> None:
        self.closed = True


def test_a_sink_that_raises_is_switched_off_with_one_event(tmp_path: Path) -> None:
    good = Collecting()
    bad = Collecting(fail_at=2)
    recorder = Recorder(tmp_path, {}, sinks=[good, bad])
    for step in (1, 2, 3, 4):
        recorder.log(step, {"a": float(step), "b": math.nan})
        time.sleep(0.02)
    recorder.close()
    assert good.seen == [(s, {"a": float(s)}) for s in (1, 2, 3, 4)] and good.closed
    assert bad.seen == [(1, {"a": 1.0})]
    failed = [e for e in lines(tmp_path / "events.jsonl") if e["kind"] == "sink_failed"]
    assert (
        len(failed) == 1
        and failed[0]["sink"] == "collecting"
        and "tracker is down" in failed[0]["error"]
    )
    assert [x["step"] for x in lines(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_sink_that_hangs_neither_delays_training_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "CLOSE_SECONDS", 0.2)
    release = threading.Event()
    recorder = Recorder(tmp_path, {}, sinks=[Collecting(block=release)])
    began = time.monotonic()
    for step in range(1100):  # more than the queue holds
        recorder.log(step, {"a": 1.0})
    recorder.close()
    assert time.monotonic() - began < 10
    release.set()
    assert sum(e["kind"] == "sink_failed" for e in lines(tmp_path / "events.jsonl")) == 1


def test_missing_tracker_packages_name_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = sinks.TrackerRun(tmp_path, {}, "p")
    for name in ("tensorboard", "wandb", "mlflow", "trackio"):
        monkeypatch.setitem(
            sys.modules, {"tensorboard": "torch.utils.tensorboard"}.get(name, name), None
        )
        with pytest.raises(InputError, match=rf"pip install 'reinforge\[{name}\]'"):
            trackers.make_sinks([name], target)
    with pytest.raises(InputError, match="tensorboard, wandb, mlflow, trackio, prometheus"):
        trackers.make_sinks(["excel"], target)


def test_tensorboard_holds_the_numbers_and_a_resume_purges_redone_steps(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resume, steps, value in ((None, (1, 2, 3), 1.0), (1, (2, 3), 5.0)):
        recorder = Recorder(
            tmp_path,
            {},
            trackers.make_sinks(["tensorboard"], sinks.TrackerRun(tmp_path, {}, "p", resume)),
            None if resume is None else {},
        )
        for step in steps:
            recorder.log(step, {"reward/mean": value * step})
        recorder.close()
        time.sleep(1.1)  # event files are named by the second
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(e.step, e.value) for e in read.Scalars("reward/mean")] == [
        (1, 1.0),
        (2, 10.0),
        (3, 15.0),
    ]


def test_wandb_style_runs_keep_their_identity_over_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict] = []

    class Run:
        def log(self, metrics: dict, step: int) -> None:
            calls.append({"step": step, **metrics})

        def finish(self) -> None:
            calls.append({"finish": True})

    class Module:
        @staticmethod
        def init(**kw: object) -> Run:
            calls.append(kw)
            return Run()

    monkeypatch.setitem(sys.modules, "wandb", Module)  # type: ignore[arg-type]
    for resume in (None, 4, None):
        target = sinks.TrackerRun(tmp_path, {"a": 1}, "proj", resume)
        [sink] = trackers.make_sinks(["wandb"], target)
        sink.open()
        sink.log(5, {"x": 1.0})
        sink.close()
    ids = [c["id"] for c in calls if "id" in c]
    assert ids[0] == ids[1] != ids[2]
    assert (
        calls[0]["project"] == "proj"
        and calls[0]["config"] == {"a": 1}
        and calls[1:3] == [{"step": 5, "x": 1.0}, {"finish": True}]
    )


def test_phases_add_up_and_inner_ones_are_not_counted_twice() -> None:
    now = [0.0]

    def passing(seconds: float) -> None:
        now[0] += seconds

    phases = PhaseTimer(clock=lambda: now[0])
    with phases("generate"):
        passing(3.0)
        with phases("reward"):
            passing(1.0)
        passing(2.0)
    passing(1.0)
    with phases("train"):
        passing(2.0)
    with phases("generate"):
        passing(1.0)
    taken = phases.take()
    assert taken == {
        "time/reward": 1.0,
        "time/generate": 6.0,
        "time/train": 2.0,
        "time/other": 1.0,
        "share/reward": 0.1,
        "share/generate": 0.6,
        "share/train": 0.2,
        "share/other": 0.1,
    }
    with pytest.raises(RuntimeError), phases("train"):
        passing(4.0)
        raise RuntimeError
    assert phases.take() == {
        "time/train": 4.0,
        "time/other": 0.0,
        "share/train": 1.0,
        "share/other": 0.0,
    }


def test_peaks_of_memory_belong_to_their_phase() -> None:
    """The gauge is the highest value since it was read; what happened inside an inner phase is not
    the outer one's.
    """
    level = [0.0]

    def gauge() -> float:
        high, level[0] = level[0], 0.5
        return high

    phases = PhaseTimer(clock=lambda: 0.0, peak=gauge)
    for most in (7.0, 5.0):
        with phases("generate"):
            level[0] = 2.0
            with phases("reward"):
                level[0] = 9.0
        with phases("train"):
            level[0] = most
    found = {k: v for k, v in phases.take().items() if k.startswith("memory/")}
    assert found == {"memory/generate_gib": 2.0, "memory/train_gib": 7.0, "memory/peak_gib": 9.0}
    with phases("train"):
        level[0] = 3.0
    assert phases.take()["memory/peak_gib"] == 3.0
    assert 0.01 < process_peak() < 1000 and (device_peak() is None) == (
        not torch.cuda.is_initialized()
    )


EVIL = "\x1b[2J[bold red]x[/bold red]\x07\u202e\r\n\ud800[link=http://x]"


def test_visible_shows_what_a_terminal_would_obey() -> None:
    assert visible(EVIL) == "\\x1b[2J[bold red]x[/bold red]\\x07\\u202e\\x0d⏎\\ud800[link=http://x]"
    assert visible("naïve 日本 ∑") == "naïve 日本 ∑"
    assert visible("a" * 50, 10) == "a" * 9 + "…"


def test_plain_view_prints_first_last_evaluations_and_every_few_seconds() -> None:
    now = [0.0]
    out = io.StringIO()
    view = View(Console(file=out, width=400), plain_seconds=2.0, clock=lambda: now[0])
    view.start(10, "demo")
    for step in range(1, 11):
        now[0] += 0.5
        view.update(
            step,
            {"reward/mean": step / 10, "response/length": 12.0}
            | ({"eval/accuracy": 0.5} if step == 3 else {}),
        )
    view.table([group("a", [EVIL], [0.25])])
    view.message(f"done {EVIL}")
    view.stop()
    text = out.getvalue().splitlines()
    assert [line.split()[1] for line in text if line.startswith("step ")] == [
        "1/10",
        "3/10",
        "7/10",
        "10/10",
    ]
    assert text[0] == "demo: 10 steps"
    assert text[1] == "step 1/10  reward 0.100  length 12  eta 0:00:04"
    assert "eval 50.0%" in text[2]
    assert text[5] == f"  [0.25] 2+2= -> {visible(EVIL)}"
    assert "\x1b" not in out.getvalue() and "\x07" not in out.getvalue()


def test_samples_in_a_log_come_after_the_line_of_their_step() -> None:
    out = io.StringIO()
    view = View(Console(file=out, width=400), plain_seconds=1000.0)
    view.start(10, "demo")
    for step in (1, 2, 3):
        view.update(step, {"train/loss": -1e-9})
        if step == 2:
            view.table([group("a", ["4"], [1.0])])
    assert [line.partition("  eta")[0] for line in out.getvalue().splitlines()[1:]] == [
        "step 1/10  loss 0.0000",
        "step 2/10  loss 0.0000",
        "  [1] 2+2= -> 4",
    ]


def test_a_resumed_view_does_not_tell_the_evaluation_of_before_as_news() -> None:
    now = [0.0]
    out = io.StringIO()
    view = View(Console(file=out, width=400), plain_seconds=2.0, clock=lambda: now[0])
    view.start(80, "demo", 12)
    for step in (13, 14, 15):
        now[0] += 1.0
        view.update(step, {"reward/mean": 0.1, "eval/accuracy": 0.2 if step < 15 else 0.7})
    text = out.getvalue().splitlines()
    assert text == [
        "demo: 80 steps, continuing after 12",
        "step 13/80  reward 0.100  eta 0:01:07",
        "step 15/80  reward 0.100  eval 70.0%  eta 0:01:05",
    ]


def test_an_evaluation_that_could_score_nothing_is_not_shown_as_0() -> None:
    out = io.StringIO()
    view = View(Console(file=out, width=400))
    view.start(2, "demo")
    view.update(0, {"eval/accuracy": math.nan, "eval/n": 0.0, "eval/unscored": 4.0})
    view.update(1, {"eval/accuracy": 0.0, "eval/n": 4.0, "eval/unscored": 0.0})
    text = [line.partition("  eta")[0] for line in out.getvalue().splitlines()]
    assert text[1:] == ["step 0/2  eval nothing could be scored", "step 1/2  eval 0.0%"]


def test_live_view_shows_numbers_and_keeps_model_text_as_text() -> None:
    out = io.StringIO()
    view = View(Console(file=out, width=240, force_terminal=True, color_system=None))
    view.start(10, "demo [red]title", first_step=4)
    view.update(
        5,
        {
            "reward/mean": 0.125,
            "tokens_per_second": 12345.0,
            "share/generate": 0.6,
            "share/train": 0.4,
            "share/other": 0.0,
        },
    )
    view.table([group("a", [EVIL, "fine"], [0.25, None])], limit=2)
    view.stop()
    text = out.getvalue()
    assert (
        "demo [red]title" in text
        and "5/10" in text
        and "0.125" in text
        and "12,345" in text
        and "generate 60%  train 40%" in text
    )
    assert "other" not in text
    assert "\\x1b[2J[bold red]x[/bold red]" in text and "\x1b[2J" not in text and "\x07" not in text


def make_run(
    path: Path, rate: float, rewards: list[float], ending: str | None = "finished"
) -> Path:
    config = {
        "model": {"path": "m"},
        "algorithm": {"name": "grpo"},
        "rewards": [{"name": "exact", "weight": 1.0}, {"name": "tags", "weight": 0.5}],
        "train": {"steps": 3, "learning_rate": rate},
        "run": {"dir": str(path)},
    }
    recorder = Recorder(path, config)
    for step, reward in enumerate(rewards, start=1):
        recorder.log(step, {"reward/mean": reward})
        if step % 2 == 0:
            recorder.log(
                step,
                {
                    "eval/accuracy": reward,
                    "eval/accuracy_low": reward - 0.1,
                    "eval/accuracy_high": reward + 0.1,
                },
            )
    if ending:
        recorder.event(ending)
    recorder.close()
    return path


@pytest.mark.parametrize("metric, told", [("response/length", True), ("train/loss", False)])
def test_settings_of_sampling_are_told_where_the_policy_samples(
    tmp_path: Path, metric: str, told: bool
) -> None:
    config = {"algorithm": {"name": "sft", "group_size": 8}, "rollout": {"temperature": 1.0}}
    recorder = Recorder(tmp_path, config)
    recorder.log(1, {metric: 1.0})
    recorder.close()
    shown = show_run(tmp_path)["config"]
    assert ("algorithm.group_size" in shown, "rollout.temperature" in shown) == (told, told)
    assert shown["algorithm.name"] == "sft"


@pytest.mark.parametrize("metric, told", [("experts/entropy", True), ("train/loss", False)])
def test_settings_of_routers_are_told_of_a_mixture(tmp_path: Path, metric: str, told: bool) -> None:
    recorder = Recorder(tmp_path, {"train": {"backend": "fsdp", "router_replay": "off"}})
    recorder.log(1, {metric: 1.0})
    recorder.close()
    shown = show_run(tmp_path)["config"]
    assert shown["train.backend"] == "fsdp" and ("train.router_replay" in shown) == told


def test_runs_are_listed_shown_and_compared(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a", 1e-5, [0.1, 0.6, 0.2, 0.4])
    b = make_run(tmp_path / "deep" / "b", 2e-5, [0.3], ending=None)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")  # a model, not a run
    for name, manifest in (
        ("step-00000002", True),
        ("step-00000004", False),
        (".tmp-step-00000005-1", True),
    ):
        (a / "checkpoints" / name).mkdir(parents=True)
        (a / "checkpoints" / name / "model.safetensors").write_bytes(b"x" * 10)
        if manifest:
            (a / "checkpoints" / name / "MANIFEST.json").write_text("{}")
    with (a / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "reward/me')  # being written
    os.utime(a / "metrics.jsonl", (1, 1))
    listed = list_runs(tmp_path)
    assert [(r["dir"], r["status"], r["step"], r["steps"], r["reward"]) for r in listed] == [
        (str(b), "interrupted", 1, 3, 0.3),
        (str(a), "finished", 4, 3, 0.4),
    ]
    shown = show_run(a)
    assert shown["best_eval"] == {
        "metric": "eval/accuracy",
        "value": 0.6,
        "step": 2,
        "low": 0.5,
        "high": 0.7,
    }
    assert shown["last"]["eval/accuracy"] == 0.4 and shown["config"]["train.learning_rate"] == 1e-5
    assert shown["config"]["rewards"] == "exact, tags x 0.5"
    assert [(c["step"], c["bytes"]) for c in shown["checkpoints"]] == [(2, 12)]
    compared = compare_runs([a, b])
    assert compared["config"] == {"train.learning_rate": [1e-5, 2e-5]}
    assert compared["metrics"]["reward/mean"] == [0.4, 0.3] and compared["metrics"][
        "eval/accuracy"
    ] == [0.4, None]
    with pytest.raises(InputError, match="not a run directory"):
        show_run(tmp_path / "model")


def test_a_run_is_running_while_its_owner_lives(tmp_path: Path) -> None:
    from reinforge.checkpoint.lock import RunLock

    run = make_run(tmp_path / "a", 1e-5, [0.1], ending=None)
    with RunLock(run):
        assert show_run(run)["status"] == "running"
        record = json.loads((run / "run.lock").read_text())
        (run / "run.lock").write_text(json.dumps(record | {"pid": 2**22 + 1}))
        assert show_run(run)["status"] == "interrupted"
        (run / "run.lock").write_text(json.dumps(record))
    assert show_run(run)["status"] == "interrupted"


def test_flatten_counts_sections_and_keeps_plain_lists() -> None:
    assert flatten({"a": {"b": 1}, "c": [{"d": 2}], "e": [1, 2], "f": {}, "g": []}) == {
        "a.b": 1,
        "c.0.d": 2,
        "e": [1, 2],
        "f": {},
        "g": [],
    }


def test_looking_at_runs_imports_no_torch() -> None:
    code = (
        "import sys, reinforge.watch.runs, reinforge.watch.report, reinforge.watch.view,"
        " reinforge.checkpoint.lock; sys.exit('torch' in sys.modules)"
    )
    src = str(SRC)
    assert (
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": src}, timeout=60
        ).returncode
        == 0
    )


def test_an_evaluation_is_printed_once_not_with_every_step_after_it() -> None:
    out = io.StringIO()
    view = View(Console(file=out, force_terminal=False, width=200), plain_seconds=1000.0)
    view.start(10, "run")
    for step in range(1, 6):
        view.update(step, {"reward/mean": 0.5} | ({"eval/accuracy": 0.25} if step >= 3 else {}))
    view.update(6, {"reward/mean": 0.5, "eval/accuracy": 0.5})
    steps = [line.split()[1] for line in out.getvalue().splitlines() if line.startswith("step")]
    assert steps == ["1/10", "3/10", "6/10"]
    # the last step, then its evaluation, which found the same
    view.update(10, {"reward/mean": 0.5, "eval/accuracy": 0.5})
    view.update(10, {"reward/mean": 0.5, "eval/accuracy": 0.5})
    last = [line for line in out.getvalue().splitlines() if line.startswith("step 10/10")]
    assert last == ["step 10/10  reward 0.500  eval 50.0%"]


def test_the_last_step_of_a_run_without_an_evaluation_is_printed_when_it_ends() -> None:
    out = io.StringIO()
    view = View(Console(file=out, force_terminal=False, width=200), plain_seconds=1000.0)
    view.start(2, "run")
    for step in (1, 2):
        view.update(step, {"reward/mean": 0.5})
    view.stop()
    lines = [line for line in out.getvalue().splitlines() if line.startswith("step")]
    assert [line.split()[1] for line in lines] == ["1/2", "2/2"]


# what it is doing


def test_a_plain_view_says_what_it_does_until_the_first_step_is_over() -> None:
    out = io.StringIO()
    view = View(Console(file=out, width=400), plain_seconds=0.0)
    view.doing("loading the model")
    view.doing("loading the model")
    view.start(3, "run")
    view.update(0, {"eval/accuracy": 0.5})
    view.doing("step 1: generating 64 answers")
    view.update(1, {"reward/mean": 0.1})
    view.doing("step 2: generating 64 answers")
    assert out.getvalue().splitlines()[:4] == [
        "loading the model",
        "run: 3 steps",
        "step 0/3  eval 50.0%",
        "step 1: generating 64 answers",
    ]
    assert "step 2: generating" not in out.getvalue()


def test_a_live_view_says_what_it_does_from_the_beginning_to_the_end() -> None:
    now = [0.0]
    out = io.StringIO()
    view = View(
        Console(file=out, width=120, force_terminal=True, color_system=None), clock=lambda: now[0]
    )
    view.doing("loading the model [red]")
    now[0] = 7.0
    view._show()
    view._live.refresh()  # type: ignore[union-attr]
    view.start(3, "run")
    view.doing("step 1: generating 64 answers")
    view._live.refresh()  # type: ignore[union-attr]
    assert (
        "loading the model [red]  7 s" in out.getvalue()
        and "step 1: generating 64 answers" in out.getvalue()
    )
    shown = len(out.getvalue())
    view.stop()
    assert "generating" not in out.getvalue()[shown:].splitlines()[-1], (
        "what is over is not left on the screen"
    )


def test_troubles_are_printed_once_and_stay_while_they_hold() -> None:
    trouble = Trouble("no_gradient", "19 of 20 steps taught nothing.", "Take easier prompts.")
    out = io.StringIO()
    plain = View(Console(file=out, width=400))
    plain.troubles([trouble])
    plain.troubles([trouble])
    assert out.getvalue().splitlines() == [
        "warning: 19 of 20 steps taught nothing. Take easier prompts."
    ]
    live = View(Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None))
    live.start(20, "run")
    live.troubles([trouble])
    assert live._troubles == [trouble.what]
    live.troubles([])
    assert live._troubles == []
    live.stop()


def test_shares_of_an_older_step_are_not_added_to_those_of_the_newest() -> None:
    out = io.StringIO()
    view = View(Console(file=out, width=120, force_terminal=True, color_system=None))
    view.start(3, "run")
    view.update(1, {"share/eval": 0.6, "share/train": 0.4})
    view.update(2, {"share/generate": 0.5, "share/train": 0.5})
    assert {key: value for key, value in view._latest.items() if key.startswith("share/")} == {
        "share/generate": 0.5,
        "share/train": 0.5,
    }
    view.stop()
