"""Runs on DeepSpeed as a user starts them: one command, or torchrun.

The first step is that of one process; what dies is named and resumes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("deepspeed") is None:
    pytest.skip("pip install 'reinforge[deepspeed]'", allow_module_level=True)
from helpers import cli_runs
from helpers.split_runs import compare, served_by
from helpers.tiny_runs import LORA
from reinforge.backends.distributed.ranks import Ranks
from reinforge.checkpoint import store

RANKS = ("train.backend=deepspeed", "train.ranks=2")
STEPS = 4


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cli_runs.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks.open(2, "cpu") as opened:
        yield opened


@pytest.fixture(scope="module")
def config(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GRPO: 4 steps, a checkpoint every 2, no evaluation.

    Its surrogate, which every rank computes once a step, can pause.
    """
    folder = tmp_path_factory.mktemp("zero")
    surrogate = {"surrogate": f"{folder / 'parts.py'}:surrogate"}
    return cli_runs.write_config(
        folder,
        tiny,
        algorithm=surrogate,
        train={"steps": STEPS},
        data={"eval": {"size": 0}},
        eval={"every": 0},
    )


@pytest.fixture(scope="module")
def whole(config: Path, tmp_path_factory: pytest.TempPathFactory) -> cli_runs.Evidence:
    """Two ranks, without interruption."""
    folder = tmp_path_factory.mktemp("whole")
    process = cli_runs.start(["train", str(config), "run.dir=run", *RANKS], folder, forked=True)
    assert process.wait() == 0, process.output()
    ours = "preparing to train (deepspeed)"
    # it keeps its words to itself
    assert "deepspeed" not in process.output().lower().replace(ours, "")
    return cli_runs.evidence(folder / "run")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_dead_rank_is_named_and_the_run_goes_on_exactly(
    config: Path, whole: cli_runs.Evidence, tmp_path: Path
) -> None:
    command = ["train", str(config), "run.dir=run", *RANKS]
    process = cli_runs.start(
        command, tmp_path, env={"PAUSE_AT": "surrogate:3", "PAUSE": "60"}, forked=True
    )
    assert process.until(lambda: (tmp_path / "paused").exists()), process.output()
    served = served_by(process.pid)
    os.kill(served, signal.SIGKILL)
    (tmp_path / "go").touch()
    began = time.monotonic()
    assert process.wait() == 3, process.output()
    assert time.monotonic() - began < 30
    last = process.output().splitlines()[-1]
    assert (
        last.startswith(f"error: rank 1 (pid {served}) was ended by SIGKILL.")
        and "Traceback" not in process.output()
    )
    assert store.step_of(store.latest(tmp_path / "run") or Path()) == 2
    again = cli_runs.start(command, tmp_path, forked=True)
    assert again.wait() == 0, again.output()
    assert cli_runs.differences(tmp_path / "run", whole, STEPS) == []


def test_torchrun_and_one_process(config: Path, whole: cli_runs.Evidence, tmp_path: Path) -> None:
    """torchrun gives the very same run as our own launcher; in one process it goes on within
    rounding.
    """
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        "-m",
        "reinforge",
    ]
    done = subprocess.run(
        [*command, "train", str(config), "run.dir=run", "train.backend=deepspeed", "train.steps=2"],
        cwd=tmp_path,
        timeout=cli_runs.TIMEOUT,
        env={**os.environ, **cli_runs.ENVIRONMENT},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    code, said = cli_runs.forked("train", config, "run.dir=run", cwd=tmp_path)
    assert code == 0 and "train.backend was 'deepspeed' and is now 'local'" in said
    found = cli_runs.evidence(tmp_path / "run")
    assert found.metrics[:2] == whole.metrics[:2]
    for ours, theirs in zip(found.metrics, whole.metrics, strict=True):
        shared = [k for k in theirs if not k.startswith(("mismatch/", "ratio/"))]
        assert {k: ours[k] for k in shared} == pytest.approx(
            {k: theirs[k] for k in shared}, rel=2e-2, abs=1e-4
        )


def test_runs_in_one_process_each_with_ranks_of_its_own(make: Any) -> None:
    """What DeepSpeed counts in a process does not outlast the ranks: new ones count from 0.

    The first test here, before any are shared.
    """
    compare(make, "sft", (*RANKS, "train.deepspeed.stage=3"))


@pytest.mark.parametrize(
    ("algorithm", "more", "sections"),
    [
        ("sft", (), {}),
        ("grpo", ("algorithm.kl.coefficient=0.1", "algorithm.epochs=2"), {}),
        ("grpo", ("algorithm.kl.coefficient=0.1", "train.deepspeed.stage=3"), {}),
        (
            "grpo",
            (
                "algorithm.kl.coefficient=0.1",
                "train.deepspeed.stage=3",
                "train.deepspeed.offload_optimizer=cpu",
            ),
            LORA,
        ),
        ("ppo", ("train.deepspeed.stage=3",), {"critic": {}}),
        ("ppo", (), {"critic": {"shared": True}}),
        ("dpo", ("train.deepspeed.stage=3",), {}),
    ],
)
def test_a_run_is_that_of_one_process(
    ranks: Ranks, make: Any, algorithm: str, more: tuple[str, ...], sections: dict[str, Any]
) -> None:
    compare(make, algorithm, (*RANKS, *more), **sections)
