"""The fused decode forward against the module's own, on the CPU; its kernels are in tests/gpu."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from helpers.toys import make_model, make_module
from reinforge.config.adapter import AdapterConfig
from reinforge.models import fused_decode
from reinforge.models.adapters import add_adapter
from reinforge.models.causal import CausalModel
from reinforge.models.fused_decode import FusedDecode
from reinforge.models.fused_linear import join, replace_linears, separate
from reinforge.models.mixture import ModelMixture
from reinforge.models.quick_layer import replace_layers
from reinforge.models.quick_mlp import replace_mlps
from reinforge.models.quick_norm import replace_norms


def hidden_of_both(model: CausalModel, fused: FusedDecode) -> tuple[Any, Any]:
    """(last hidden states, cached keys) of both forwards over the same trial."""
    found = []
    for own in (False, True):
        layout = fused_decode.trial(fused.shapes, model.dtype, torch.device("cpu"))
        tokens = torch.tensor([7, 3, 11])
        with torch.no_grad():
            if own:
                hidden = model.hidden(tokens, layout.cached, layout)
            else:
                hidden = fused.hidden(tokens, layout)
        found.append((hidden, layout.cache.keys))
    return found[0], found[1]


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "mistral", "qwen3_moe", "mixtral"])
def test_hidden_states_are_the_modules_own(arch: str) -> None:
    model = make_model(arch)
    fused = FusedDecode.of(model)
    assert fused is not None
    for joined in (False, True, False):
        changed = join(model.module) if joined else separate(model.module)
        assert changed or not joined
        (got, keys), (want, own_keys) = hidden_of_both(model, fused)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
        for mine, other in zip(keys, own_keys, strict=True):
            torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("arch", ["gemma2", "gemma3", "gpt2", "cohere"])
def test_other_parts_keep_their_own_forward(arch: str) -> None:
    assert FusedDecode.of(make_model(arch)) is None


@pytest.mark.parametrize(
    "changes",
    [{"residual_multiplier": 0.5}, {"embedding_multiplier": 3.0}, {"attention_multiplier": 1.0}],
)
def test_the_same_parts_put_together_otherwise_are_noticed(changes: dict[str, float]) -> None:
    """Granite has the parts of Llama, and multiplies in between. What it multiplies attention by is
    said by the layer itself and used.
    """
    model = make_model("granite", **changes)
    fused = FusedDecode.of(model)
    if "attention_multiplier" in changes:
        assert fused is not None
        (got, _), (want, _) = hidden_of_both(model, fused)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    else:
        assert fused is None


def test_one_strange_layer_is_enough() -> None:
    model = make_model("llama")
    layer = model.trunk.layers[1]
    own = layer.forward
    layer.forward = lambda x, **kwargs: own(x, **kwargs) * 1.001
    assert FusedDecode.of(model) is None


def test_what_depends_on_a_far_position_is_noticed() -> None:
    """As in Ministral 3, whose queries grow past 16,384 tokens."""
    model = make_model("llama")
    layer = model.trunk.layers[1]
    own = layer.forward

    def forward(x: Any, **given: Any) -> Any:
        return own(x, **given) * (1 + 0.1 * (given["position_ids"] > 16_384)[..., None])

    layer.forward = forward
    assert FusedDecode.of(model) is None


def test_copies_of_layers_for_the_trial_leave_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where their parts refer to them in circles, which a collector would have to find."""
    model = adapted("qwen2")
    replace_norms(model.module)
    replace_mlps(model.module)
    replace_linears(model.module)
    replace_layers(model.module)
    copies: list[nn.Module] = []

    def deepcopy(part: nn.Module) -> nn.Module:
        copies.append(copy.deepcopy(part))
        return copies[-1]

    monkeypatch.setattr(fused_decode, "copy", SimpleNamespace(deepcopy=deepcopy))
    weights = sum(weight.numel() for weight in model.module.parameters())
    assert FusedDecode.of(model) is not None
    assert len(copies) == 2
    assert not any(weight.numel() for part in copies for weight in part.parameters())
    assert sum(weight.numel() for weight in model.module.parameters()) == weights


def test_two_models_at_once_keep_their_own_forward() -> None:
    policy = make_model("llama")

    @contextmanager
    def other() -> Iterator[CausalModel]:
        yield policy

    assert FusedDecode.of(policy) is not None
    for share in (0.5, 1.0):
        assert FusedDecode.of(ModelMixture(policy, other, share)) is None


def adapted(arch: str, *, exact: bool = False, **settings: Any) -> CausalModel:
    module = add_adapter(make_module(arch), AdapterConfig(rank=2, **settings), seed=0)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.3)
    return CausalModel(module, exact=exact)


@pytest.mark.parametrize("settings", [{}, {"targets": ["q_proj", "down_proj"]}, {"kind": "rslora"}])
def test_adapters_are_part_of_it(settings: dict[str, Any]) -> None:
    model = adapted("qwen3", **settings)
    fused = FusedDecode.of(model)
    assert fused is not None
    for _ in range(2):
        (got, keys), (want, own_keys) = hidden_of_both(model, fused)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
        for mine, other in zip(keys, own_keys, strict=True):
            torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-5)
        with torch.no_grad():  # trained in place
            for name, weight in model.module.named_parameters():
                if "lora" in name:
                    weight.mul_(1.5)


def test_other_adapters_keep_their_own_forward() -> None:
    assert FusedDecode.of(adapted("llama", kind="dora")) is None


# exact mode: to the bit


def assert_equal_bits(model: CausalModel) -> FusedDecode:
    fused = FusedDecode.of(model)
    assert fused is not None
    (got, keys), (want, own_keys) = hidden_of_both(model, fused)
    assert torch.equal(got, want)
    assert all(torch.equal(a, b) for a, b in zip(keys, own_keys, strict=True))
    return fused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "mistral"])
def test_exact_hidden_states_have_the_bits_of_the_modules_own(
    arch: str, dtype: torch.dtype
) -> None:
    model = CausalModel(make_module(arch).to(dtype), exact=True)
    fused = assert_equal_bits(model)
    layouts = [fused_decode.trial(fused.shapes, dtype, model.device, rows=40) for _ in range(2)]
    tokens = torch.arange(40) % 60
    with torch.no_grad():
        got = fused.hidden(tokens, layouts[0])
        assert torch.equal(got, model.hidden(tokens, layouts[1].cached, layouts[1]))
        some = fused_decode.trial(fused.shapes, dtype, model.device, rows=40)
        some.tables = some.tables[5:6]
        some.cached = some.cached[5:6]
        alone = fused.hidden(tokens[5:6], some)
    assert torch.equal(alone, got[5:6])


@pytest.mark.parametrize("settings", [{}, {"targets": ["q_proj", "down_proj"]}, {"kind": "rslora"}])
def test_exact_adapters_have_the_bits_of_the_modules_own(settings: dict[str, Any]) -> None:
    assert_equal_bits(adapted("qwen3", exact=True, **settings))


def test_what_stands_around_the_layers_is_compared_to_the_bit_too() -> None:
    for exact in (False, True):
        model = CausalModel(make_module(), exact=exact)
        own = model.trunk.norm.forward
        model.trunk.norm.forward = lambda x, own=own: own(x) * (1 + 2e-7)
        assert (FusedDecode.of(model) is None) == exact


def test_a_difference_of_rounding_is_too_much_for_exact_mode() -> None:
    for exact in (False, True):
        model = CausalModel(make_module(), exact=exact)
        layer = model.trunk.layers[1]
        own = layer.forward
        layer.forward = lambda x, own=own, **kwargs: own(x, **kwargs) * (1 + 2e-7)
        assert (FusedDecode.of(model) is None) == exact
