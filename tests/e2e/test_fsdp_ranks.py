"""Runs on the ranks of FSDP2 as a user starts them. What dies is named, and nothing is left."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.runs_on_ranks import CommandsOnRanks, RunsOnRanks, gone
from helpers.tiny_runs import LORA
from helpers.toys import make_model, make_samples, train_config
from reinforge.algorithms.losses.supervised import NLLLoss
from reinforge.backends.distributed.ranks import Ranks
from reinforge.backends.fsdp.backend import FsdpBackend
from reinforge.backends.local import LocalBackend
from reinforge.core.batch import Totals, pack
from reinforge.core.errors import InputError, StoppedByPolicy


class TestFsdp(RunsOnRanks):
    backend = "fsdp"
    compared = (
        ("sft", ("train.ema=0.9",), {}),
        ("grpo", ("algorithm.kl.coefficient=0.1", "algorithm.epochs=2"), {}),
        ("grpo", (), LORA),
        ("ppo", (), {"critic": {}}),
        ("ppo", (), {"critic": {"shared": True}}),
    )


class TestFsdpCommands(CommandsOnRanks):
    """Every rank generates; with DeepSpeed and Megatron rank 0 does."""

    backend = "fsdp"
    keys = ("rollout.all_ranks=true",)
    library = False

    @pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
    def test_the_other_ranks_do_not_outlive_the_first(self, config: Path, tmp_path: Path) -> None:
        process, served = self.paused(config, tmp_path, 1)
        process.kill()
        assert gone(served)


class Fails(NLLLoss):
    def __call__(self, tokens: Any, totals: Totals) -> Any:
        if os.environ.get("RANK") == "2":
            raise ValueError("a loss that does not like rank 2")
        return super().__call__(tokens, totals)


def test_three_ranks_and_an_error_in_one() -> None:
    samples = make_samples((20, 5, 12, 3, 9, 31, 4))
    batches = pack(samples, 40)
    totals = Totals.of(batches)
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


def refuses(member: Any, rank: int) -> None:
    if member.rank == rank:
        raise InputError("nobody likes it", where="key", fix="Leave it out.")


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.long)])
def test_wrong_input_is_that_also_where_ranks_find_it(rank: int) -> None:
    """Its exit code is 2, however often it is asked for again while the run ends."""
    with Ranks.open(2, "cpu") as ranks:
        for _ in range(2):
            with pytest.raises(InputError, match=r"key: nobody likes it\. Leave it out\."):
                ranks.make(refuses, [(rank,)] * 2)
