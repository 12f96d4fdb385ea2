"""Models that Megatron's layers are not made for are refused before anything is trained."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if find_spec("megatron") is None:
    pytest.skip("pip install 'reinforge[megatron]'", allow_module_level=True)

from helpers.split_backends import load
from helpers.toys import train_config
from reinforge.backends.distributed.ranks import Ranks
from reinforge.backends.megatron.model import MegatronModel, check_architecture
from reinforge.backends.megatron.worker import MegatronWorker
from reinforge.core.errors import InputError
from reinforge.models.causal import CausalModel

LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "attention_factor": 1.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
}


@pytest.mark.parametrize(
    ("arch", "changes", "tensor", "said"),
    [
        ("llama", {"num_key_value_heads": 1}, 2, "equal parts"),
        ("llama", {"attention_bias": True}, 1, "biases"),
        ("llama", {"hidden_act": "gelu"}, 1, "activation gelu"),
        ("gemma3", {}, 1, "Gemma3ForCausalLM has the architecture gemma3_text"),
        ("granite", {}, 1, "GraniteForCausalLM has the architecture granite"),
        ("mistral", {}, 1, "sliding windows"),
        ("llama", {"rope_parameters": LONG}, 1, "depends on the length"),
        ("gpt2", {}, 1, "GPT2LMHeadModel has the architecture gpt2"),
    ],
)
def test_what_its_layers_are_not_is_refused(
    arch: str, changes: dict[str, Any], tensor: int, said: str
) -> None:
    model = load("full", arch, **changes)
    assert isinstance(model, CausalModel)
    with pytest.raises(InputError, match=said):
        check_architecture(model, tensor)


def test_layers_that_compute_something_else_are_found() -> None:
    """The proof before training, on tokens."""
    other = load("full", "llama")
    other.layers[1].mlp.act_fn = torch.nn.GELU()
    with Ranks.open(1, "cpu") as one:
        MegatronModel(one.own, load("full", "llama"), 1)
        with pytest.raises(InputError, match="other log-probs in Megatron's layers"):
            MegatronModel(one.own, other, 1)


@pytest.mark.parametrize("kind", ["critic", "head"])
def test_other_heads_are_refused(kind: str) -> None:
    with pytest.raises(InputError, match="causal LMs"):
        MegatronWorker(
            SimpleNamespace(), partial(load, kind), train_config(backend="megatron"), {}, False
        )
