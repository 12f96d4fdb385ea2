"""Runs on DeepSpeed and on Megatron's layers as a user starts them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from helpers.runs_on_ranks import CommandsOnRanks, RunsOnRanks, compare
from helpers.tiny_runs import LORA


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        find_spec(package) is None, reason=f"pip install 'reinforge[{package}]'"
    )


KL = "algorithm.kl.coefficient=0.1"
STAGE_3 = "train.deepspeed.stage=3"


@needs("deepspeed")
@pytest.mark.long
def test_runs_in_one_process_each_with_ranks_of_its_own(make: Any) -> None:
    """What DeepSpeed counts in a process does not outlast the ranks: new ones count from 0.

    The first test here, before any are shared.
    """
    compare(make, ("train.backend=deepspeed", "train.ranks=2"), ("sft", (STAGE_3,), {}))


@needs("deepspeed")
class TestDeepSpeed(RunsOnRanks):
    backend = "deepspeed"
    compared = (
        ("sft", (), {}),
        ("grpo", (KL, "algorithm.epochs=2"), {}),
        ("grpo", (KL, STAGE_3), {}),
        ("grpo", (KL, STAGE_3, "train.deepspeed.offload_optimizer=cpu"), LORA),
        ("ppo", (STAGE_3,), {"critic": {}}),
        ("ppo", (), {"critic": {"shared": True}}),
        ("dpo", (STAGE_3,), {}),
    )


@needs("deepspeed")
@pytest.mark.long  # in make test: those of FSDP2
class TestDeepSpeedCommands(CommandsOnRanks):
    backend = "deepspeed"


@needs("megatron")
class TestMegatron(RunsOnRanks):
    backend = "megatron"
    keys = ("train.tensor_parallel=2",)
    compared = (
        ("sft", (), {}),
        ("grpo", (KL, "algorithm.epochs=2"), {}),
        ("grpo", (KL, "train.tensor_parallel=1"), {}),
        ("dpo", (), {}),
    )


@needs("megatron")
@pytest.mark.long  # in make test: those of FSDP2
class TestMegatronCommands(CommandsOnRanks):
    backend = "megatron"
    keys = ("train.tensor_parallel=2",)
