"""Models that Megatron's layers are not made for are refused before anything is trained."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

if find_spec("megatron") is None:
    pytest.skip("pip install 'reinforge[megatron]'", allow_module_level=True)

from reinforge.backends.megatron import MegatronModel, check_architecture
from reinforge.backends.model_parallel import MegatronShard
from reinforge.backends.ranks import Ranks
from reinforge.core.errors import InputError
from reinforge.models.causal import CausalModel
from split_backends import load
from toys import train_config


@pytest.mark.parametrize(
    ("arch", "changes", "tensor", "said"),
    [
        ("llama", {"num_key_value_heads": 1}, 2, "equal parts"),
        ("llama", {"attention_bias": True}, 1, "biases"),
        ("llama", {"hidden_act": "gelu"}, 1, "activation gelu"),
        ("gemma3", {}, 1, "Gemma3ForCausalLM has"),
        ("gpt2", {}, 1, "GPT2LMHeadModel has layers without"),
    ],
)
def test_what_its_layers_are_not_is_refused(arch: str, changes: dict[str, Any], tensor: int, said: str) -> None:
    model = load("full", arch, **changes)
    assert isinstance(model, CausalModel)
    with pytest.raises(InputError, match=said):
        check_architecture(model, tensor)


def test_layers_that_compute_something_else_are_found() -> None:
    """The proof before training, on tokens: Granite's parameters have Llama's names, but its layers scale what they add."""
    same = {"attention_multiplier": 8**-0.5}
    with Ranks.open(1, "cpu") as one:
        MegatronModel(one.own, load("full", "granite", **same), 1)
        with pytest.raises(InputError, match="other log-probs in Megatron's layers"):
            MegatronModel(one.own, load("full", "granite", residual_multiplier=0.5, **same), 1)


@pytest.mark.parametrize("kind", ["critic", "head"])
def test_other_heads_are_refused(kind: str) -> None:
    with pytest.raises(InputError, match="causal LMs"):
        MegatronShard(SimpleNamespace(), partial(load, kind), train_config(backend="megatron"), {}, False)
