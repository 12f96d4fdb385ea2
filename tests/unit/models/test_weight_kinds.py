"""Weights are counted by kind on a model without numbers, as they are on one with numbers."""

from __future__ import annotations

from typing import Any

import pytest
import transformers as t

from helpers.toys import make_module
from reinforge.backends.microbatch import facts_of
from reinforge.config.adapter import AdapterConfig
from reinforge.config.train import TrainConfig
from reinforge.core.model_facts import ModelFacts
from reinforge.models.adapters import add_adapter
from reinforge.models.causal import CausalModel
from reinforge.models.meta_model import count_on_meta
from reinforge.models.toy_shapes import shrunken
from reinforge.models.weight_kinds import count_weights

TRAIN = TrainConfig(steps=1)
H = 32  # hidden size of the toys


def test_published_models_have_the_weights_that_they_are_known_for() -> None:
    """Qwen3-30B-A3B, of which a token meets 3.3 billion with the embedding and the head."""
    shape = t.Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    )
    found = count_on_meta(shape, TRAIN)
    assert found.base == 30_532_122_624
    assert found.kinds["experts"] == 48 * 128 * 3 * 2048 * 768
    assert found.kinds["router"] == 48 * 128 * 2048
    assert found.met + 2 * found.kinds["embedding"] == pytest.approx(3.35e9, rel=0.01)


def test_a_hybrid_is_counted_as_it_is() -> None:
    """One layer is a gated delta net, one attends: their sizes differ."""
    module = make_module("qwen3_5")
    found = count_weights(module)
    layers = module.model.layers
    state = sum(p.numel() for n, p in layers[0].linear_attn.named_parameters() if "norm" not in n)
    attention = sum(p.numel() for n, p in layers[1].self_attn.named_parameters() if "norm" not in n)
    assert found.kinds["state layers"] == state != attention == found.kinds["attention"]
    assert found.base == sum(p.numel() for p in module.parameters())
    assert ModelFacts.of(module.config).parameters() != found.base  # as if both attended


@pytest.mark.parametrize("arch", ["llama", "qwen3_5", "qwen2_moe", "gpt2", "granite_moe"])
@pytest.mark.parametrize("rank", [None, 4])
def test_without_numbers_there_are_as_many(arch: str, rank: int | None) -> None:
    adapter = None if rank is None else AdapterConfig(rank=rank)
    module: Any = make_module(arch)
    if adapter is not None:
        module = add_adapter(module, adapter, seed=0)
    facts = facts_of(CausalModel(module))
    found = count_on_meta(make_module(arch).config, TRAIN, adapter)
    assert (found.base, found.trained) == (facts.weights, facts.trained)
    assert (found.matrices, found.met) == (facts.matrices, facts.met)
    learns = sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert found.trained == learns
    assert found.kinds.get("adapter", 0) == (learns if rank else 0)


def test_a_shared_expert_is_met_by_every_token() -> None:
    """Two of four experts of 24, and one of 24 that is shared."""
    shape = make_module("qwen2_moe").config
    found = count_on_meta(shape, TRAIN)
    one = 3 * H * 24
    assert found.kinds["experts"] == 2 * 4 * one
    assert found.kinds["MLP"] == 2 * one
    assert found.kinds["router"] == 2 * (4 * H + H)  # and the gate of the shared one
    assert found.matrices - found.met == 2 * 2 * one
    facts = ModelFacts.of(shape)
    assert (facts.shared, facts.wide) == (24, 3 * 24)


def test_frozen_weights_and_saved_adapters(tmp_path: Any) -> None:
    shape = shrunken(t.LlamaConfig)
    frozen = count_on_meta(shape, TrainConfig(steps=1, freeze=["model.embed_tokens"]))
    assert frozen.trained == frozen.base - frozen.kinds["embedding"]
    made = add_adapter(make_module("llama"), AdapterConfig(rank=3, targets=["q_proj"]), seed=0)
    made.save_pretrained(tmp_path)
    again = count_on_meta(
        make_module("llama").config, TRAIN, AdapterConfig(path=str(tmp_path), rank=16)
    )
    assert again.trained == 2 * 3 * (H + H)


def test_nf4_packs_linear_layers() -> None:
    """And neither experts, which are one tensor, nor the embedding."""
    from reinforge.backends.memory_model import NF4, weight_bytes

    shape = shrunken(t.MixtralConfig)
    found = count_on_meta(shape, TRAIN, AdapterConfig(kind="qlora", rank=4))
    assert found.linear < found.kinds["attention"] + found.kinds["router"] + 1
    facts = ModelFacts.of(shape, rank=4, weights=found.base, trained=found.trained)
    packed = ModelFacts.of(
        shape, rank=4, weights=found.base, trained=found.trained, packed=found.linear
    )
    largest = max(a * b for a, b, _ in facts.linears().values())
    assert weight_bytes(facts) - weight_bytes(packed) == (
        2 * (found.linear - largest) - int(NF4 * found.linear)
    )
