"""What `train.backend: megatron` refuses, with the key, before anything is loaded.

Megatron itself is in tests/scale.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from reinforge.config import megatron
from reinforge.core.errors import InputError
from reinforge.plan.preflight import preflight

KEYS = ("train.backend=megatron", "train.ranks=4", "train.tensor_parallel=2")


@pytest.mark.parametrize(
    ("key", "overrides", "sections"),
    [
        ("model.exact", ("model.exact=true",), {}),
        ("model.compile", ("model.compile=true",), {}),
        ("train.ema", ("train.ema=0.9",), {}),
        ("train.neftune", ("train.neftune=5",), {}),
        ("train.optimizer.offload", ("train.optimizer.offload=true",), {}),
        (
            "algorithm.kl.reference",
            ("algorithm.kl.coefficient=0.1", "algorithm.kl.reference.kind=ema"),
            {},
        ),
        ("sequence_parallel", ("train.sequence_parallel=2",), {}),
        ("offload_weights", ("train.offload_weights=true",), {}),
        ("checkpoint.sharded", ("run.checkpoint.sharded=true",), {}),
        ("train.tensor_parallel|adapter", (), {"adapter": {"kind": "lora"}}),
        ("critic", ("algorithm.name=ppo",), {"critic": {}}),
        ("algorithm.name", ("algorithm.name=bradley_terry",), {}),
        ("groups of 3|multiple of 3", ("train.tensor_parallel=3",), {}),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(
    make: Any, key: str, overrides: tuple[str, ...], sections: dict[str, Any]
) -> None:
    make("x", "grpo", *KEYS)  # this much is fine
    named = [o.removeprefix("algorithm.name=") for o in overrides if o.startswith("algorithm.name")]
    algorithm = named[0] if named else "sft" if "train.neftune=5" in overrides else "grpo"
    with pytest.raises(InputError, match=key):
        make(
            "x",
            algorithm,
            *KEYS,
            *(o for o in overrides if not o.startswith("algorithm.name")),
            **sections,
        )


@pytest.mark.parametrize(
    ("change", "overrides", "said"),
    [
        ({}, (), None),
        ({"model_type": "gpt2"}, (), "train.backend: .* has the architecture gpt2"),
        ({"model_type": "mistral", "sliding_window": 4096}, (), "sliding windows"),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, (), None),
        (
            {},
            ("train.tensor_parallel=4",),
            "train.tensor_parallel: 4 query heads, 2 key heads .* 4 equal parts",
        ),
        (
            {},
            ("train.tensor_parallel=4", "train.backend=fsdp"),
            "train.tensor_parallel: 4 query heads",
        ),
        ({"model_type": "gpt2"}, ("train.backend=fsdp", "train.tensor_parallel=1"), None),
    ],
)
def test_plan_reads_what_the_model_says_of_itself(
    make: Any, tmp_path: Path, change: dict[str, Any], overrides: tuple[str, ...], said: str | None
) -> None:
    facts = {
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        **change,
    }
    (tmp_path / "config.json").write_text(json.dumps(facts))
    report = preflight(make("x", "sft", *KEYS, *overrides, f"model.path={tmp_path}"))
    found = [
        e
        for e in report.errors
        if ("megatron" in e or "equal parts" in e) and "not installed" not in e
    ]
    assert re.search(said, found[0]) if said else not found
    assert "4 ranks" in report.summary["backend"]


def test_a_package_that_is_not_there(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # another package of that namespace
    monkeypatch.setattr(
        megatron, "find_spec", lambda name: None if name == "megatron.core" else True
    )
    assert [e for e in preflight(make("x", "sft", *KEYS)).errors if "reinforge[megatron]" in e]
