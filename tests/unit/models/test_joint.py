"""Joint projections: the same numbers, one memory, gradients as ever."""

from __future__ import annotations

import copy

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from reinforge.models.attention import PackedLayout
from reinforge.models.causal import CausalModel
from reinforge.models.fused_linear import join

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "initializer_range": 0.2,
}


def hidden(model: CausalModel) -> torch.Tensor:
    tokens = torch.arange(9)
    return model.hidden(
        tokens, torch.arange(9), PackedLayout([9], torch.tensor([0, 9], dtype=torch.int32))
    )


def models() -> list[CausalModel]:
    torch.manual_seed(0)
    return [
        CausalModel(LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()),
        CausalModel(Qwen2ForCausalLM(Qwen2Config(**SHAPE)).eval()),
    ]


def test_a_joint_product_gives_what_its_parts_give() -> None:
    for model in models():
        with torch.no_grad():
            before = hidden(model)
            assert join(model.module) == 4 and join(model.module) == 0
            torch.testing.assert_close(hidden(model), before, atol=1e-6, rtol=1e-6)
        # with gradients nothing changed, to the bit
        torch.testing.assert_close(hidden(model), before, atol=0, rtol=0)


def test_updates_in_place_reach_the_joint_weight_and_copies_are_their_own() -> None:
    for model in models():
        join(model.module)
        twin = CausalModel(copy.deepcopy(model.module))
        with torch.no_grad():
            before = hidden(model)
            for p in model.module.parameters():
                p.mul_(1.1)
            now = hidden(model)
            assert float((now - before).abs().max()) > 1e-3
            torch.testing.assert_close(hidden(twin), before, atol=0, rtol=0)
        torch.testing.assert_close(hidden(model), now, atol=1e-6, rtol=1e-6)


def test_gradients_arrive_at_every_part() -> None:
    model = models()[0]
    hidden(model).square().sum().backward()
    wanted = {n: p.grad.clone() for n, p in model.module.named_parameters() if p.grad is not None}
    model.module.zero_grad()
    join(model.module)
    hidden(model).square().sum().backward()
    for name, p in model.module.named_parameters():
        if name in wanted:
            assert p.grad is not None
            torch.testing.assert_close(p.grad, wanted[name], atol=0, rtol=0)
