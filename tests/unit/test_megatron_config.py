"""What `train.backend: megatron` refuses, with the key, before anything is loaded. Megatron itself is in tests/scale."""

from __future__ import annotations

from typing import Any

import pytest

from reinforge.app.preflight import preflight
from reinforge.config import megatron
from reinforge.core.errors import InputError

KEYS = ("train.backend=megatron", "train.ranks=4", "train.tensor_parallel=2")


@pytest.mark.parametrize(
    ("key", "overrides", "sections"),
    [
        ("model.exact", ("model.exact=true",), {}),
        ("model.compile", ("model.compile=true",), {}),
        ("train.ema", ("train.ema=0.9",), {}),
        ("train.neftune", ("train.neftune=5",), {}),
        ("train.optimizer.offload", ("train.optimizer.offload=true",), {}),
        ("algorithm.kl.reference", ("algorithm.kl.coefficient=0.1", "algorithm.kl.reference.kind=ema"), {}),
        ("sequence_parallel", ("train.sequence_parallel=2",), {}),
        ("offload_weights", ("train.offload_weights=true",), {}),
        ("checkpoint.sharded", ("run.checkpoint.sharded=true",), {}),
        ("train.tensor_parallel|adapter", (), {"adapter": {"kind": "lora"}}),
        ("critic", ("algorithm.name=ppo",), {"critic": {}}),
        ("groups of 3|multiple of 3", ("train.tensor_parallel=3",), {}),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(make: Any, key: str, overrides: tuple[str, ...], sections: dict[str, Any]) -> None:
    make("x", "grpo", *KEYS)  # this much is fine
    algorithm = "ppo" if "critic" in sections else "sft" if "train.neftune=5" in overrides else "grpo"
    with pytest.raises(InputError, match=key):
        make("x", algorithm, *KEYS, *(o for o in overrides if not o.startswith("algorithm.name")), **sections)


def test_a_package_that_is_not_there(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron, "find_spec", lambda name: None)
    assert [e for e in preflight(make("x", "sft", *KEYS)).errors if "reinforge[megatron]" in e]
