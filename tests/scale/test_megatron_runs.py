"""Runs on Megatron's layers as a user starts them.

The first step is that of one process; what dies is named and resumes.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("megatron") is None:
    pytest.skip("pip install 'reinforge[megatron]'", allow_module_level=True)
from helpers import cli_runs
from helpers.split_runs import compare, served_by
from reinforge.backends.distributed.ranks import Ranks

RANKS = ("train.backend=megatron", "train.ranks=2", "train.tensor_parallel=2")
STEPS = 4


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks.open(2, "cpu") as opened:
        yield opened


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        ("sft", ()),
        ("grpo", ("algorithm.kl.coefficient=0.1", "algorithm.epochs=2")),
        ("grpo", ("algorithm.kl.coefficient=0.1", "train.tensor_parallel=1")),
        ("dpo", ()),
    ],
)
def test_a_run_is_that_of_one_process(
    ranks: Ranks, make: Any, algorithm: str, more: tuple[str, ...]
) -> None:
    compare(make, algorithm, (*RANKS, *more))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_dead_rank_is_named_and_the_run_goes_on_exactly(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("megatron")
    surrogate = {"surrogate": f"{folder / 'parts.py'}:surrogate"}
    config = cli_runs.write_config(
        folder,
        cli_runs.make_model(tmp_path_factory.mktemp("model")),
        algorithm=surrogate,
        train={"steps": STEPS},
        data={"eval": {"size": 0}},
        eval={"every": 0},
    )
    command = ["train", str(config), "run.dir=run", *RANKS]
    undisturbed = tmp_path_factory.mktemp("whole")
    cut = tmp_path_factory.mktemp("cut")
    process = cli_runs.start(command, undisturbed, forked=True)
    assert process.wait() == 0, process.output()
    said = process.output().lower()
    for ours in ("train.backend=megatron", "preparing to train (megatron)"):
        said = said.replace(ours, "")
    assert "megatron" not in said, "it keeps its words to itself"
    whole = cli_runs.evidence(undisturbed / "run")
    process = cli_runs.start(
        command, cut, env={"PAUSE_AT": "surrogate:3", "PAUSE": "60"}, forked=True
    )
    assert process.until(lambda: (cut / "paused").exists()), process.output()
    served = served_by(process.pid)
    os.kill(served, signal.SIGKILL)
    (cut / "go").touch()
    assert process.wait() == 3, process.output()
    assert (
        process.output()
        .splitlines()[-1]
        .startswith(f"error: rank 1 (pid {served}) was ended by SIGKILL.")
    )
    again = cli_runs.start(command, cut, forked=True)
    assert again.wait() == 0, again.output()
    assert cli_runs.differences(cut / "run", whole, STEPS) == []
