"""Decoder layers whose additions are parts of their norms' kernels, against the layers' own
forward. Without a GPU the norms' kernels run in Triton's interpreter, all else as it is.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    StableLmConfig,
)

from reinforge.core.batch import Batch
from reinforge.core.sample import Sample
from reinforge.models import quick_layer, quick_norm
from reinforge.models.causal import CausalModel
from reinforge.models.quick_layer import QuickLayer, is_usual, replace_layers
from reinforge.models.quick_mlp import replace_mlps
from reinforge.models.quick_norm import forked_norm, kernel_norm, replace_norms

pytest.importorskip("triton")
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
HALF = torch.bfloat16 if ON_GPU else torch.float16  # the interpreter cuts bfloat16 off
EPS = 1e-6
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "pad_token_id": None,
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


# ---- the function ----


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("size", [40, 900])
def test_it_has_the_bits_of_an_addition_and_a_norm(adds: bool, centred: bool, size: int) -> None:
    x, delta = normal(2, 1, 7, size).to(HALF)
    weight = normal(size, seed=1).to(HALF)
    total, y = forked_norm(x, delta if adds else None, weight, EPS, centred=centred)
    want = x + delta if adds else x
    assert torch.equal(total, want)
    assert torch.equal(y, kernel_norm(want, weight, EPS, centred=centred))


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("used", [(True, True), (True, False), (False, True)], ids=str)
def test_gradients_are_those_of_the_formula(
    adds: bool, centred: bool, used: tuple[bool, bool]
) -> None:
    """Where one output is not used, its gradient is not there. Inputs, and the gradients that come
    back, are slices of wider rows.
    """
    x, delta = (normal(9, 60, seed=i)[:, 10:50].requires_grad_() for i in range(2))
    weight = normal(40, seed=2).requires_grad_()
    learned = [x, delta, weight] if adds else [x, weight]
    wide = [part.detach().double().requires_grad_() for part in learned]
    total = wide[0] + wide[1] if adds else wide[0]
    normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + EPS)
    true = (total * 1, normed * (1 + wide[-1] if centred else wide[-1]))
    found = forked_norm(x, delta if adds else None, weight, EPS, centred=centred)
    which = [i for i in range(2) if used[i]]
    backs = [normal(9, 80, seed=3 + i)[:, 5:45] for i in which]
    ours = torch.autograd.grad([found[i] for i in which], learned, backs, allow_unused=True)
    wants = torch.autograd.grad(
        [true[i] for i in which], wide, [back.double() for back in backs], allow_unused=True
    )
    for one, two in zip(ours, wants, strict=True):
        assert (one is None) == (two is None)
        if two is not None:
            torch.testing.assert_close(one.double(), two, rtol=1e-5, atol=1e-5)


def test_a_gradient_is_rounded_once_and_repeats() -> None:
    """The sum of two gradients in 16 bits is as near as one rounding allows."""
    x, dy, beside = (normal(33, 96, seed=i).to(HALF) for i in range(3))
    weight = normal(96, seed=3).to(HALF)

    def gradient() -> Tensor:
        leaf = x.clone().requires_grad_()
        outs = forked_norm(leaf, None, weight, EPS)
        return torch.autograd.grad(outs, leaf, (beside, dy))[0]

    wide = x.double().requires_grad_()
    true = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * weight.double()
    (want,) = torch.autograd.grad((true, wide * 1), wide, (dy.double(), beside.double()))
    found = gradient()
    torch.testing.assert_close(found.double(), want, rtol=2**-8, atol=1e-4)
    assert torch.equal(found, gradient())


# ---- layers ----


def layer_of(config: Any) -> nn.Module:
    trunk: Any = AutoModelForCausalLM.from_config(config).model
    found: nn.Module = trunk.layers[0]
    return found


@pytest.mark.parametrize("kind", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
def test_layers_are_found_by_what_they_compute(kind: Any) -> None:
    assert is_usual(layer_of(kind(**SIZES)))


@pytest.mark.parametrize("kind", [Gemma2Config, GraniteConfig, StableLmConfig])
def test_others_are_left_alone(kind: Any) -> None:
    """Norms after attention too; a factor of what is added; a layout that is not handed on."""
    assert not is_usual(layer_of(kind(**SIZES)))


def test_a_layer_that_adds_in_another_order_is_another_one() -> None:
    class Odd(nn.Module):
        def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
            me: Any = self
            normed = me.input_layernorm(hidden_states)
            x = hidden_states + me.self_attn(hidden_states=normed, **kwargs)[0]
            out: Tensor = x + me.mlp(me.post_attention_layernorm(x)) + 1
            return out

    assert not is_usual(Odd())


def test_layers_of_experts_keep_their_forward() -> None:
    sizes = {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "num_experts": 4}
    module = AutoModelForCausalLM.from_config(Qwen2MoeConfig(**SIZES, **sizes))
    replace_norms(module)
    replace_mlps(module)
    assert replace_layers(module) == 0


# ---- models ----


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms use their kernels in any precision, and without a GPU."""
    for module in (quick_norm, quick_layer):
        monkeypatch.setattr(module, "takes_kernel", lambda x, weight: x.dtype == weight.dtype)


def made(dtype: torch.dtype, *, quick: bool = True, lora: bool = False) -> CausalModel:
    torch.manual_seed(0)
    module: Any = AutoModelForCausalLM.from_config(Qwen2Config(**SIZES)).to(DEVICE, dtype)
    if lora:
        module = get_peft_model(
            module,
            LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False),
        )
        module.to(dtype)
    model = CausalModel(module)
    replace_norms(model.module)
    replace_mlps(model.module)
    replace_layers(model.module)
    count = 0
    for layer in model.layers:
        count += isinstance(getattr(vars(layer).get("forward"), "__self__", None), QuickLayer)
        if not quick:
            del layer.forward
    assert count == 2
    return model


def batch() -> Batch:
    tokens = torch.randint(0, 50, (14,), generator=torch.Generator().manual_seed(1)).tolist()
    rows = [tokens, tokens[:3] + tokens[:6]]
    samples = [Sample.from_tokens("a", row, [False] * 3 + [True] * (len(row) - 3)) for row in rows]
    return Batch.pack(samples, share=True).to(DEVICE)


def passed(model: CausalModel) -> tuple[Tensor, Tensor]:
    """Log-probs, and all gradients end to end."""
    model.module.zero_grad()
    logprobs = model.logprobs(batch(), temperature=1.0)[0]
    logprobs.float().sum().backward()
    grads = [p.grad.flatten().float() for p in model.module.parameters() if p.grad is not None]
    return logprobs.detach(), torch.cat(grads)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("lora", [False, True])
def test_a_model_has_the_gradients_of_its_own_layers(lora: bool) -> None:
    own, ours = (passed(made(torch.float32, quick=quick, lora=lora)) for quick in (False, True))
    torch.testing.assert_close(ours[0], own[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours[1], own[1], rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("everywhere")
def test_training_scoring_and_the_layers_own_forward_have_the_same_bits() -> None:
    own, ours = (made(HALF, quick=quick) for quick in (False, True))
    trained = passed(ours)[0]
    assert torch.equal(passed(own)[0], trained)
    with torch.no_grad():
        assert torch.equal(ours.logprobs(batch(), temperature=1.0)[0], trained)


@pytest.mark.usefixtures("everywhere")
def test_checkpointed_layers_have_the_same_gradients() -> None:
    model = made(HALF)
    want = passed(model)
    model.module.gradient_checkpointing_enable(  # type: ignore[operator]
        gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    model.recompute(True)
    assert all(torch.equal(a, b) for a, b in zip(passed(model), want, strict=True))


@pytest.mark.usefixtures("everywhere")
def test_who_listens_to_a_part_hears_it() -> None:
    """A hook on a norm gives its layer its own forward back; on other parts nothing changes."""
    model = made(HALF)
    want = passed(model)
    heard: list[nn.Module] = []
    first: Any = model.layers[0]
    for part in (first, first.post_attention_layernorm, first.self_attn, first.mlp):
        part.register_forward_hook(lambda module, args, out: heard.append(module))
    logprobs, _ = passed(model)
    assert heard == [first.self_attn, first.post_attention_layernorm, first.mlp, first]
    assert torch.equal(logprobs, want[0])


@pytest.mark.usefixtures("everywhere")
def test_additions_are_gone() -> None:
    """Of the four of a layer, two forward and two backward, one is left."""

    def count(model: CausalModel) -> int:
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities) as found:
            passed(model)
        return sum(
            event.count
            for event in found.key_averages()
            if event.key in ("aten::add", "aten::add_")
        )

    own, ours = (count(made(HALF, quick=quick)) for quick in (False, True))
    assert own - ours == 2 * 3


@pytest.mark.skipif(ON_GPU, reason="on a GPU the kernels compute")
def test_elsewhere_a_layer_keeps_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, and in float32 for that matter: see `quick_norm.takes_kernel`."""
    monkeypatch.setattr(quick_layer, "forked_norm", None)  # whoever calls it fails
    ours = passed(made(HALF))
    own = passed(made(HALF, quick=False))
    assert all(torch.equal(a, b) for a, b in zip(ours, own, strict=True))
