"""kill -9 while rollouts are ahead of training, or carried over: the same command again ends with
the same weights, metrics and samples.
"""

from __future__ import annotations

import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from helpers import cli_runs
from helpers.cli_runs import Whole
from reinforge.checkpoint import store

KINDS: dict[str, dict[str, Any]] = {
    "staleness": {"rollout": {"staleness": 2}},
    "overlap": {"rollout": {"staleness": 1, "overlap": True}},
    "partial": {
        "rollout": {"staleness": 2, "partial": True, "max_batch": 6},
        "sampling": {"over_provision": 1.5},
    },
}


@pytest.fixture(scope="module", params=KINDS)
def run(
    request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> Whole:
    folder = tmp_path_factory.mktemp(request.param)
    made = cli_runs.whole(
        folder, cli_runs.write_config(folder, tiny, train={"steps": 9}, **KINDS[request.param]), 9
    )
    late = [
        line["rollout/staleness"] for line in made.evidence.metrics if "rollout/staleness" in line
    ]
    assert max(late) > 0, "otherwise this shows nothing"
    return made


@pytest.mark.parametrize("point", ["step:end@5", "save:after-rename@2"])
def test_killed_at_a_named_point(run: Whole, tmp_path: Path, point: str) -> None:
    process = cli_runs.start(
        run.command(), tmp_path, env={"REINFORGE_CRASH_AT": point}, forked=True
    )
    assert process.wait() == -signal.SIGKILL, process.output()
    extra = store.load(store.steps(tmp_path / "run")[0])[1]
    held = (
        extra["parts"]["partial"]["carried"]
        if "partial" in extra["parts"]
        else extra["parts"]["ahead"]["begun"]
    )
    assert held, "the checkpoint holds what was under way"
    _finished(run, tmp_path)


@pytest.mark.long
def test_killed_at_random(run: Whole, tmp_path: Path) -> None:
    seconds = random.Random(0).uniform(0.2, 0.8) * run.seconds
    while True:
        process = cli_runs.start(run.command(), tmp_path, forked=True)
        process.until(lambda: (tmp_path / "run" / "events.jsonl").exists())
        time.sleep(seconds)
        if process.kill() == -signal.SIGKILL:
            break
        shutil.rmtree(tmp_path / "run")
        seconds *= 0.7
    _finished(run, tmp_path)


def test_asked_to_end(run: Whole, tmp_path: Path) -> None:
    """SIGTERM saves what is under way with the step it came in, and the run goes on from there."""
    process = cli_runs.start(run.command(), tmp_path, forked=True)
    process.until(
        lambda: (
            (tmp_path / "run" / "metrics.jsonl").exists()
            and len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) > 3
        )
    )
    process.send(signal.SIGTERM)
    assert process.wait() in (143, -signal.SIGTERM), process.output()
    _finished(run, tmp_path)


def _finished(run: Whole, folder: Path) -> None:
    process = cli_runs.start(run.command(), folder, forked=True)
    assert process.wait() == 0, process.output()
    assert run.differences(folder / "run") == []
