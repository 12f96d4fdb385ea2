"""Every ending has a report and a few lines: finished, stopped, failed, asked to end, killed.

Also of a run that is still going.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.paths import SRC
from helpers.tiny_runs import DATA, EVAL, launch, lines, odd
from helpers.toys import SilentView
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.run import train_config
from reinforge.checkpoint.lock import RunLock
from reinforge.cli.main import main
from reinforge.config.schema import Config
from reinforge.core.errors import StoppedByPolicy, Terminated
from reinforge.loops.run import Run
from reinforge.watch.doctor.trouble import Trouble
from reinforge.watch.ending import describe_end, reached
from reinforge.watch.logs import read_lines
from reinforge.watch.recorder import Recorder
from reinforge.watch.report import tiles
from reinforge.watch.runs import show_run
from reinforge.watch.view import SteadyConsole, View

pytestmark = pytest.mark.timeout(180)


def ends(cfg: Config, view: SilentView, reward: Callable[..., Any] = odd) -> BaseException | None:
    """Runs it, and gives back what it ended with."""
    try:
        train_config(cfg, CallerObjects(data=DATA, eval_data=EVAL, rewards=[reward]), view)
    except BaseException as error:
        return error
    return None


def check(cfg: Config, view: SilentView, status: str, words: str = "") -> str:
    """The files and the words that every ending leaves; returns the words."""
    folder = Path(cfg.run.dir)
    told = view.messages[-1]
    page = (folder / "report.html").read_text()
    assert (
        show_run(folder)["status"] == status
        and f'<span class="badge {status}">{status}</span>' in page
    )
    assert json.loads((folder / "summary.json").read_text())["status"] == status
    assert str(folder / "report.html") in told and words in told and words in page
    return told


def test_a_finished_run_tells_what_it_reached_what_it_cost_and_what_to_do_next(
    make: Callable[..., Config],
) -> None:
    cfg = make("run", "grpo", "train.steps=2", "eval.every=1", "eval.at_start=true")
    view = SilentView()
    assert ends(cfg, view) is None
    told = check(cfg, view, "finished")
    rows = told.splitlines()
    assert rows[0].startswith("finished  2 of 2 steps in ") and len(rows) <= 9
    assert (
        re.search(
            r"^reached   eval/accuracy [\d.]+% -> [\d.]+% \(95% interval ", told, re.MULTILINE
        )
        and "mean reward 0." in told
    )
    assert " a step (" in told and "tokens sampled" in told and "drafts" not in told
    shares = re.search(r" a step \((.*?)\)", told).group(1)  # type: ignore[union-attr]
    assert "other" not in shares and abs(sum(map(int, re.findall(r"(\d+)%", shares))) - 100) <= 2
    assert f"reinforge chat {cfg.run.dir}" in told and f"reinforge export {cfg.run.dir} OUT" in told
    summary = json.loads((Path(cfg.run.dir) / "summary.json").read_text())
    assert (
        summary["metrics"]["eval"].keys() >= {"accuracy", "n"}
        and summary["metrics"]["train"]["grad_norm"] > 0
        and "epoch" in summary["metrics"]["run"]
    )
    assert (
        summary["steps"] == summary["of"] == 2
        and summary["seconds"] > 0
        and summary["troubles"] == []
    )


def test_a_run_with_drafts_tells_what_they_gave(make: Callable[..., Config]) -> None:
    cfg = make("run", "grpo", "train.steps=2", "rollout.speculation.when=always")
    view = SilentView()
    assert ends(cfg, view) is None
    key = "efficiency/accepted_length"
    found = [line[key] for line in lines(cfg) if key in line]
    assert len(found) == 2
    assert f"{sum(found) / 2:.2f} tokens a step with drafts" in check(cfg, view, "finished")


def test_a_stopped_run_has_a_report_that_says_why(make: Callable[..., Config]) -> None:
    def nothing(completions: list[str]) -> list[None]:
        return [None] * len(completions)

    cfg = make("run", "grpo", "train.steps=9", "run.checkpoint.every=1")
    view = SilentView()
    assert isinstance(ends(cfg, view, nothing), StoppedByPolicy)
    told = check(cfg, view, "stopped", "3 steps in a row had no sample that could be scored")
    assert "goes on from its newest checkpoint" in told
    assert "eval/accuracy: nothing could be scored (4 answers without a reward)" in told
    assert [line["step"] for line in lines(cfg, "groups.jsonl")] == [1, 3]


def test_a_failed_run_has_a_report_that_says_why(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    from reinforge.backends.local import LocalBackend

    def dies(self: LocalBackend) -> Any:
        raise ZeroDivisionError("the disk melted\nwith details")

    monkeypatch.setattr(LocalBackend, "step", dies)
    cfg = make("run", "grpo")
    view = SilentView()
    assert isinstance(ends(cfg, view), ZeroDivisionError)
    check(cfg, view, "failed", "ZeroDivisionError: the disk melted")


def test_an_interrupted_run_has_a_report(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    end_step = Run.end_step

    async def interrupted(self: Run, *given: Any) -> None:
        self.terminate(signal.SIGINT)
        await end_step(self, *given)

    monkeypatch.setattr(Run, "end_step", interrupted)
    cfg = make("run", "grpo")
    view = SilentView()
    assert isinstance(ends(cfg, view), Terminated)
    told = check(cfg, view, "terminated", "stopped by SIGINT at step 1 of 3")
    assert "start it again with the same command" in told


def test_a_terminal_that_closes_ends_a_run_with_the_code_of_its_signal(
    tiny_dir: str, tmp_path: Path
) -> None:
    """What is written to it afterwards fails, and must not take the place of the ending."""
    settings = {
        "model": {"path": tiny_dir},
        "algorithm": {"name": "grpo", "group_size": 2},
        "data": {"source": "arithmetic:chain"},
        "rewards": [{"name": "exact_number"}],
        "rollout": {"max_new_tokens": 4, "kv_gib": 0.01},
        "train": {"steps": 100000, "prompts_per_step": 2},
        "run": {"dir": str(tmp_path / "run"), "checkpoint": {"every": 0}},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(settings))
    program = (
        "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from reinforge.cli.main"
        " import main; sys.exit(main())"
    )
    ours, theirs = os.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", program, "train", str(tmp_path / "c.yaml")],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", "TERM": "xterm"},
    )
    os.close(theirs)
    try:
        shown = b""
        while b"2/100000" not in shown:
            shown += os.read(ours, 4096)
        os.close(ours)
        assert child.wait(120) == 128 + signal.SIGHUP
    finally:
        child.kill()
        child.wait()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "terminated" and (tmp_path / "run" / "report.html").exists()
    assert show_run(tmp_path / "run")["checkpoints"]


def test_an_ending_that_cannot_be_written_takes_nothing_from_the_run(
    make: Callable[..., Config],
) -> None:
    cfg = make("run", "grpo")
    view = SilentView()
    (Path(cfg.run.dir) / "report.html").mkdir(parents=True)
    result = train_config(cfg, CallerObjects(data=DATA, rewards=[odd]), view)
    assert (
        result.steps == 3
        and result.report is None
        and view.messages[-1].startswith("no report was written: ")
    )


def test_a_run_killed_by_the_kernel_gets_its_report_by_the_command(
    tiny_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {
        "model": {"path": tiny_dir},
        "algorithm": {"name": "grpo", "group_size": 2},
        "data": {"source": "arithmetic:chain"},
        "rewards": [{"name": "exact_number"}],
        "rollout": {"max_new_tokens": 4, "kv_gib": 0.01},
        "train": {"steps": 5, "prompts_per_step": 2},
        "run": {"dir": str(tmp_path / "run")},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(settings))
    killed = {"REINFORGE_CRASH_AT": "step:end@3", "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "reinforge", "train", str(tmp_path / "c.yaml")],
        env=os.environ | killed,
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "run" / "report.html").exists()
    assert main(["runs", "report", str(tmp_path / "run")]) == 0
    said = capsys.readouterr()
    assert (
        said.out.strip() == str(tmp_path / "run" / "report.html")
        and "interrupted, step 2 of 5" in said.err
    )
    page = (tmp_path / "run" / "report.html").read_text()
    assert '<span class="badge interrupted">interrupted</span> step 2 of 5, as of 20' in page


def test_a_run_that_is_still_going_gets_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder(
        tmp_path, {"algorithm": {"name": "grpo"}, "train": {"steps": None, "epochs": 2}}, steps=40
    )
    recorder.log(7, {"reward/mean": 0.5, "train/skipped": 0.0, "train/grad_norm": 1.0})
    with RunLock(tmp_path):
        assert main(["runs", "report", str(tmp_path)]) == 0
        assert "running, step 7 of 40" in capsys.readouterr().err
        page = (tmp_path / "report.html").read_text()
    recorder.close()
    assert (
        '<span class="badge running">running</span> step 7 of 40, as of 20' in page
        and "<script src" not in page
    )


def test_what_was_begun_after_an_ending_is_not_ended(tmp_path: Path) -> None:
    """The lock is released after the last event: what the events say of an ending comes first, and
    a new beginning takes it back.
    """
    recorder = Recorder(tmp_path, {})
    recorder.event("finished")
    with RunLock(tmp_path):
        assert show_run(tmp_path)["status"] == "finished"
        Recorder(tmp_path, {}, resume_offsets=recorder.offsets()).close()
        assert show_run(tmp_path)["status"] == "running"
    assert show_run(tmp_path)["status"] == "interrupted"
    recorder.close()


def test_the_end_of_a_reward_model_does_not_offer_a_chat(make: Callable[..., Config]) -> None:
    rows = [{"prompt": f"{i}", "chosen": "yes", "rejected": "no"} for i in range(8)]
    cfg = make("run", "bradley_terry", "train.steps=1", rewards=[])
    train_config(cfg, CallerObjects(data=rows), SilentView())
    told = describe_end(Path(cfg.run.dir))
    assert "reinforge export" in told and "reinforge chat" not in told and "loss 0." in told


def test_only_the_phases_of_the_newest_step_are_shown(make: Callable[..., Config]) -> None:
    """An evaluation is booked on the step after it; two steps later its share is no
    longer there.
    """
    seen: list[dict[str, float]] = []

    class Watching(SilentView):
        def update(self, step: int, metrics: dict[str, float]) -> None:
            seen.append({key: value for key, value in metrics.items() if key.startswith("share/")})

    cfg = make("run", "grpo", "train.steps=4", "eval.every=2", "run.checkpoint.every=1")
    ends(cfg, Watching())
    assert len(seen) >= 4 and all(
        sum(found.values()) == pytest.approx(1.0) for found in seen if found
    )
    assert any("share/eval" in found for found in seen) and any(
        found and "share/eval" not in found for found in seen
    )


def test_every_phase_says_what_it_does(make: Callable[..., Config]) -> None:
    cfg = make("run", "grpo", "train.steps=2", "eval.every=2", "run.checkpoint.every=1")
    view = SilentView()
    ends(cfg, view)
    doing = view.activities
    order = [
        "loading torch and transformers",
        "reading data (python)",
        "tokenising 16 prompts",
        f"loading the model {cfg.model.path}",
        "evaluating on held-out rows",
        "step 1: generating 16 answers to 4 prompts",
        "step 1: waiting for rewards",
        "step 1: updating the weights",
        "saving a checkpoint",
        "step 2: generating 16 answers to 4 prompts",
    ]
    assert list(dict.fromkeys(text for text in doing if text in order)) == order
    assert doing[-2:] == ["evaluating on held-out rows", "saving a checkpoint"]
    assert lines(cfg)[-1]["step"] == 2


def test_launch_has_the_report(make: Callable[..., Config]) -> None:
    result = launch(make())
    assert result.report == result.run_dir / "report.html" and result.report.exists()


@pytest.mark.parametrize(
    ("algorithm", "first", "last", "told"),
    [
        (
            "dpo",
            {"rewards/accuracy": 0.5, "rewards/margin": 0.0, "train/loss": 0.7},
            {"rewards/accuracy": 0.9, "rewards/margin": 1.5, "train/loss": 0.2},
            ["reward accuracy 50.0% -> 90.0%", "reward margin 0 -> 1.5", "loss 0.7 -> 0.2"],
        ),
        (
            "bradley_terry",
            {"reward/accuracy": 0.5, "reward/margin": 0.0, "train/loss": 0.7},
            {"reward/accuracy": 1.0, "reward/margin": 2.0, "train/loss": 0.1},
            ["accuracy 50.0% -> 100.0%", "margin 0 -> 2", "loss 0.7 -> 0.1"],
        ),
        (
            "sft",
            {"train/loss": 1.0, "sft/nll": 1.0},
            {"train/loss": 0.5, "sft/nll": 0.0, "eval/loss": 0.0},
            ["eval/loss 0 (perplexity 1)", "loss 1 -> 0.5", "perplexity 2.718 -> 1"],
        ),
        (
            "grpo",
            {"reward/mean": 0.1, "reward/unscored": 0.0, "train/loss": 0.3},
            {"reward/mean": 0.6, "reward/unscored": 0.0, "train/loss": 0.4},
            ["mean reward 0.1 -> 0.6"],
        ),
        (
            "online_dpo",
            {"reward/mean": 0.1, "reward/unscored": 0.0, "rewards/accuracy": 0.5},
            {"reward/mean": 0.6, "reward/unscored": 0.0, "rewards/accuracy": 0.75},
            ["mean reward 0.1 -> 0.6", "reward accuracy 50.0% -> 75.0%"],
        ),
        ("forward_kl", {"train/loss": 2.0}, {"train/loss": 1.0}, ["loss 2 -> 1"]),
    ],
)
def test_the_end_tells_what_people_look_at_in_a_run_of_its_family(
    algorithm: str,
    first: dict[str, float],
    last: dict[str, float],
    told: list[str],
    tmp_path: Path,
) -> None:
    recorder = Recorder(tmp_path, {"algorithm": {"name": algorithm}}, steps=2)
    for step, metrics in enumerate((first, last), start=1):
        recorder.log(
            step, {"time/step": 1.0, "train/skipped": 0.0, "train/grad_norm": 1.0} | metrics
        )
    recorder.event("finished")
    recorder.close()
    run = show_run(tmp_path)
    lines = list(read_lines(tmp_path / "metrics.jsonl"))
    assert reached(run, lines) == told
    # of many steps the first and the last tenth
    many = [line for line in lines for _ in range(10)]
    averaged = [text for text in told if not text.startswith("eval/")]
    assert reached(run, many)[-len(averaged) :] == [
        f"{text} (first and last 2 steps)" for text in averaged
    ]


@pytest.mark.parametrize("before", [True, False])
def test_the_end_tells_that_the_last_evaluation_could_score_nothing(
    before: bool, tmp_path: Path
) -> None:
    """Not 0%, and not the accuracy of an evaluation before it."""
    recorder = Recorder(tmp_path, {"algorithm": {"name": "grpo"}}, steps=2)
    if before:
        scored = {"eval/accuracy": 0.5, "eval/accuracy_low": 0.2, "eval/accuracy_high": 0.8}
        recorder.log(0, {**scored, "eval/n": 4.0, "eval/unscored": 0.0})
    recorder.log(1, {"time/step": 1.0, "train/skipped": 0.0, "reward/mean": 0.25})
    recorder.log(1, {"eval/accuracy": math.nan, "eval/n": 0.0, "eval/unscored": 4.0})
    recorder.close()
    run = show_run(tmp_path)
    assert "eval/accuracy" not in run["last"] and run["last"]["eval/unscored"] == 4
    told = reached(run, [])
    assert told == ["eval/accuracy: nothing could be scored (4 answers without a reward)"]
    found = tiles(run, [])
    assert found[0] == ("last evaluation", "nothing could be scored")
    assert any(label.startswith("best eval/accuracy") for label, _ in found) == before


def test_a_resumed_run_tells_the_time_of_all_starts_and_of_this_one(
    make: Callable[..., Config],
) -> None:
    first = SilentView()
    falling = "train.schedule.kind=cosine"
    assert ends(make("run", "grpo", "train.steps=2", falling), first) is None
    assert re.match(r"finished  2 of 2 steps in [\d.]+ s\n", first.messages[-1])
    again = SilentView()
    cfg = make("run", "grpo", "train.steps=3", falling)
    assert ends(cfg, again) is None
    jump = (
        "warning: the learning rate falls over the whole run (cosine): from step 3 on it is that of"
        " a run of 3 steps, so it jumps. To have one curve, begin again in another directory."
    )
    assert jump in again.messages and jump not in first.messages
    assert re.match(
        r"finished  3 of 3 steps in [\d.]+ s \(this start: 1 step in [\d.]+ s\)\n",
        again.messages[-1],
    )
    summary = json.loads((Path(cfg.run.dir) / "summary.json").read_text())
    assert summary["steps_this_start"] == 1
    assert summary["seconds_all_starts"] > summary["seconds"] > 0

    fewer = SilentView()
    assert ends(make("run", "grpo", "train.steps=1", falling), fewer) is None
    assert not any("learning rate falls" in text for text in fewer.messages)
    said = (
        "this run has done 3 steps already, and 1 are asked for: nothing to do. To go on, ask for"
        " more than 3 steps; for a run of 1 steps, use another directory."
    )
    assert said in fewer.messages
    assert re.match(r"finished  3 of 3 steps in [\d.]+ s", fewer.messages[-1])


def test_what_cannot_be_shown_takes_nothing_from_the_run(make: Callable[..., Config]) -> None:
    class Gone(SilentView):
        def message(self, text: str) -> None:
            if text.startswith("finished"):
                raise OSError(errno.EIO, "Input/output error")

    cfg = make("run", "grpo", "train.steps=1")
    assert ends(cfg, Gone()) is None
    assert json.loads((Path(cfg.run.dir) / "summary.json").read_text())["status"] == "finished"


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("kind", [errno.EIO, errno.EPIPE])
def test_a_terminal_that_is_gone_is_no_error_of_the_view(kind: int, live: bool) -> None:
    class Hung(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(kind, os.strerror(kind))

    view = View(SteadyConsole(file=Hung(), force_terminal=live, width=80))
    view.doing("reading data")
    view.start(3, "run")
    view.update(1, {"train/loss": 1.0})
    view.troubles([Trouble("kind", "what.", "fix.")])
    view.message("finished")
    view.stop()
