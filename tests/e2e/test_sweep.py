"""`reinforge sweep` as a user runs it: every trial a process, cut by Ctrl-C, and gone on with."""

from __future__ import annotations

import signal
from pathlib import Path

from helpers.cli_runs import cli, evaluated_steps, start, trained_steps, write_config
from reinforge.watch.runs import read_json

PAUSE = {"PAUSE_AT": "reward:10", "PAUSE": "60"}


def test_a_sweep_is_cut_and_goes_on(tmp_path: Path, tiny_dir: str) -> None:
    """The signal goes to the sweep alone, while the trial waits for a reward of its second step.
    Four rewards are asked for in an evaluation and in a step.
    """
    config = write_config(tmp_path, Path(tiny_dir), train={"steps": 3}, eval={"every": 2})
    command = ["sweep", str(config), "--over", "train.learning_rate=log:1e-4..1e-2"]
    command += ["--trials", "1", "--dir", "sweep"]
    trial = tmp_path / "sweep" / "trial-001"

    cut = start(command, tmp_path, env=PAUSE)
    assert cut.until((tmp_path / "paused").exists), cut.output()
    cut.send(signal.SIGINT)
    (tmp_path / "go").touch()
    assert cut.wait() == 130, cut.output()
    assert "stopped by SIGINT after 0 of 1 trials; the same command continues." in cut.output()
    assert "Traceback" not in cut.output()
    assert trained_steps(trial) in ([1], [1, 2])  # as the signal comes sooner or later

    done = cli(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trial 1 of 1 goes on where it was cut: train.learning_rate" in done.stdout
    assert trained_steps(trial) == [1, 2, 3]
    assert evaluated_steps(trial) == [0, 2, 3]
    (record,) = read_json(tmp_path / "sweep" / "summary.json")["trials"]
    assert (record["state"], record["steps"]) == ("finished", 3)
    *_, best, run, summary, _, _, command = done.stdout.splitlines()
    assert best.startswith("best     trial 1, eval/reward ")
    assert (run, summary) == ("run      sweep/trial-001", "summary  sweep/summary.json")
    assert command.startswith(f"reinforge train {config} train.learning_rate=")
