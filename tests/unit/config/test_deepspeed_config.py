"""What `train.backend: deepspeed` refuses, with the key, before anything is loaded.

DeepSpeed itself is in tests/scale.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reinforge.core.errors import InputError
from reinforge.loops.config_changes import MAY_CHANGE
from reinforge.plan.preflight import preflight

KEYS = ("train.backend=deepspeed", "train.ranks=2")


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("model.exact", ("model.exact=true",)),
        ("model.compile", ("model.compile=true",)),
        ("train.ema", ("train.ema=0.9",)),
        ("train.deepspeed.offload_optimizer=cpu", ("train.optimizer.offload=true",)),
        (
            "algorithm.kl.reference",
            ("algorithm.kl.coefficient=0.1", "algorithm.kl.reference.kind=ema"),
        ),
        ("offload_parameters: stage 2", ("train.deepspeed.offload_parameters=cpu",)),
        ("overlap: stage 1", ("train.deepspeed.stage=1", "train.deepspeed.overlap=true")),
        (
            "offload_optimizer: only from stage 2",
            ("train.deepspeed.stage=1", "train.deepspeed.offload_optimizer=cpu"),
        ),
        (
            "offload_optimizer: DeepSpeed writes to nvme in stage 3",
            ("train.deepspeed.offload_optimizer=nvme", "train.deepspeed.nvme_path=x"),
        ),
        (
            "nvme_path: what is offloaded",
            ("train.deepspeed.stage=3", "train.deepspeed.offload_optimizer=nvme"),
        ),
        ("nvme_path: nothing is offloaded", ("train.deepspeed.nvme_path=x",)),
        ("stage", ("train.deepspeed.stage=4",)),
        ("overlap: stage 0", ("train.deepspeed.stage=0", "train.deepspeed.overlap=true")),
        ("gather_bucket: stage 0", ("train.deepspeed.stage=0", "train.deepspeed.gather_bucket=9")),
        ("tensor_parallel", ("train.tensor_parallel=2",)),
        ("checkpoint.sharded", ("run.checkpoint.sharded=true",)),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(
    make: Any, key: str, overrides: tuple[str, ...]
) -> None:
    make("x", "grpo", *KEYS)  # this much is fine
    with pytest.raises(InputError, match=key):
        make("x", "grpo", *KEYS, *overrides)


def test_qlora_and_a_section_that_nobody_reads(make: Any) -> None:
    with pytest.raises(InputError, match=r"adapter.kind"):
        make("x", "sft", *KEYS, adapter={"kind": "qlora"})
    with pytest.raises(InputError, match=r"train.deepspeed: only the backend deepspeed reads it"):
        make("x", "sft", "train.deepspeed.stage=3")


def test_a_directory_that_is_not_there(make: Any, tmp_path: Path) -> None:
    nvme = ("train.deepspeed.stage=3", "train.deepspeed.offload_optimizer=nvme")
    wrong = preflight(
        make("x", "sft", *KEYS, *nvme, f"train.deepspeed.nvme_path={tmp_path / 'gone'}")
    ).errors
    assert [e for e in wrong if "train.deepspeed.nvme_path" in e and "there is no directory" in e]
    right = preflight(
        make("x", "sft", *KEYS, *nvme, f"train.deepspeed.nvme_path={tmp_path}")
    ).errors
    assert not [e for e in right if "nvme_path" in e]


def test_it_may_change_when_a_run_is_resumed() -> None:
    assert "train.deepspeed." in MAY_CHANGE and "train.backend" in MAY_CHANGE
