"""Runs on several ranks as a user starts them: by torchrun, and by one command that starts the
others. What dies is named, and nothing is left.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import cli_runs
from helpers.toys import make_model, make_samples, train_config
from reinforge.algorithms.losses.supervised import NLLLoss
from reinforge.backends.distributed.ranks import Ranks
from reinforge.backends.fsdp.backend import FsdpBackend
from reinforge.checkpoint import store
from reinforge.core.batch import Totals, pack
from reinforge.core.errors import StoppedByPolicy

STEPS = 4
RANKS = ("train.backend=fsdp", "train.ranks=2")


@pytest.fixture(scope="module")
def config(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GRPO: 4 steps, a checkpoint every 2, no evaluation.

    Its surrogate, which every rank computes once a step, can pause.
    """
    folder = tmp_path_factory.mktemp("fsdp")
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
    return cli_runs.evidence(folder / "run")


def children(pid: int) -> list[int]:
    found = [
        int(p)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for p in (task / "children").read_text().split()
    ]
    return [p for p in found if "distributed.ranks" in Path(f"/proc/{p}/cmdline").read_text()]


def gone(pid: int, seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if (
            not Path(f"/proc/{pid}").exists()
            or Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        ):
            return True
        time.sleep(0.05)
    return False


def paused(config: Path, folder: Path, call: int) -> tuple[cli_runs.Started, int]:
    """The run in the middle of a pass, and the process of rank 1."""
    process = cli_runs.start(
        ["train", str(config), "run.dir=run", *RANKS],
        folder,
        env={"PAUSE_AT": f"surrogate:{call}", "PAUSE": "60"},
        forked=True,
    )
    assert process.until(lambda: (folder / "paused").exists()), process.output()
    (served,) = children(process.pid)
    return process, served


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_dead_rank_is_named_and_the_run_goes_on_exactly(
    config: Path, whole: cli_runs.Evidence, tmp_path: Path
) -> None:
    process, served = paused(config, tmp_path, 3)
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
    assert gone(served) and store.step_of(store.latest(tmp_path / "run") or Path()) == 2
    (tmp_path / "paused").unlink()
    (tmp_path / "go").unlink()

    # now rank 0 itself, in the same step: the other one does not outlive it
    process, served = paused(config, tmp_path, 1)
    process.kill()
    assert gone(served)
    again = cli_runs.start(["train", str(config), "run.dir=run", *RANKS], tmp_path, forked=True)
    assert again.wait() == 0, again.output()
    assert cli_runs.differences(tmp_path / "run", whole, STEPS) == []


def test_torchrun_and_one_process(config: Path, whole: cli_runs.Evidence, tmp_path: Path) -> None:
    """torchrun gives the very same run as our own launcher; SIGTERM-free halves in one process
    continue it within rounding.
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
        [*command, "train", str(config), "run.dir=run", "train.backend=fsdp", "train.steps=2"],
        cwd=tmp_path,
        timeout=cli_runs.TIMEOUT,
        env={**os.environ, **cli_runs.ENVIRONMENT},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    code, said = cli_runs.forked("train", config, "run.dir=run", cwd=tmp_path)
    assert code == 0 and "train.backend was 'fsdp' and is now 'local'" in said
    found = cli_runs.evidence(tmp_path / "run")
    assert found.metrics[:2] == whole.metrics[:2]
    for ours, theirs in zip(found.metrics, whole.metrics, strict=True):
        shared = [k for k in theirs if not k.startswith(("mismatch/", "ratio/"))]
        assert {k: ours[k] for k in shared} == pytest.approx(
            {k: theirs[k] for k in shared}, rel=2e-2, abs=1e-4
        )


class Fails(NLLLoss):
    def __call__(self, tokens: Any, totals: Totals) -> Any:
        if os.environ.get("RANK") == "2":
            raise ValueError("a loss that does not like rank 2")
        return super().__call__(tokens, totals)


def test_three_ranks_and_an_error_in_one() -> None:
    samples = make_samples((20, 5, 12, 3, 9, 31, 4))
    batches = pack(samples, 40)
    totals = Totals.of(batches)
    from reinforge.backends.local import LocalBackend

    local = LocalBackend(make_model(), train_config(), total_steps=3)
    want = {**local.forward_backward(batches, NLLLoss(), totals), **local.step().metrics()}
    with Ranks.open(3, "cpu") as ranks:
        sharded = FsdpBackend(ranks, make_model, train_config(), total_steps=3)
        assert {
            **sharded.forward_backward(batches, NLLLoss(), totals),
            **sharded.step().metrics(),
        } == pytest.approx(want, rel=1e-5)
        theirs = local.state().tensors
        mine = sharded.state().tensors
        assert all(torch.allclose(mine[k], theirs[k], atol=1e-5) for k in theirs)
        pids = [child.pid for child in ranks.children.values()]
        with pytest.raises(
            StoppedByPolicy, match="rank 2 failed: ValueError: a loss that does not like rank 2"
        ):
            sharded.forward_backward(batches, Fails(), totals)
        with pytest.raises(StoppedByPolicy, match="rank 2 failed"):  # nothing can be asked any more
            sharded.step()
    assert all(gone(pid) for pid in pids)
