"""Layers with LoRA adapters as functions of autograd: numbers and gradients of a sum of modules.
Without a GPU the kernels are interpreted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.passes import passed
from helpers.toys import make_module, make_samples
from reinforge.config.adapter import AdapterConfig
from reinforge.core.batch import Batch
from reinforge.models import fused_linear, lora_linear, quick_mlp
from reinforge.models.adapter_dropout import DroppedRows, drop_rows
from reinforge.models.adapters import add_adapter
from reinforge.models.causal import CausalModel
from reinforge.models.decoding import decoding
from reinforge.models.fp8_layers import Fp8Layers
from reinforge.models.fused_linear import join, replace_linears, separate
from reinforge.models.lora_linear import LoraLinears, lora_mlp

pytest.importorskip("triton")
lora_gate = pytest.importorskip("reinforge.models.kernels.lora_gate")
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
INPUTS = 24
RANKS = (4, 2, 8)
SCALES = (0.5, 2.0, 1.5)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw, dtype=dtype).to(DEVICE)


def linears(sizes: Sequence[int], biased: bool, joined: bool, inputs: int = INPUTS) -> LoraLinears:
    weights = [normal(n, inputs, seed=n) for n in sizes]
    biases = [normal(n, seed=100 + n) for n in sizes] if biased else []
    whole = torch.cat(weights), torch.cat(biases) if biased else None
    return LoraLinears(weights, biases, list(SCALES[: len(sizes)]), whole if joined else None)


def adapters(sizes: Sequence[int], inputs: int = INPUTS) -> list[Tensor]:
    ranks = RANKS[: len(sizes)]
    downs = [normal(r, inputs, seed=200 + r) for r in ranks]
    ups = [normal(n, r, seed=300 + n) for n, r in zip(sizes, ranks, strict=True)]
    return [part.requires_grad_() for part in (*downs, *ups)]


def sum_of_modules(parts: LoraLinears, x: Tensor, given: Sequence[Tensor]) -> Tensor:
    count = len(parts.weights)
    outs = []
    for i, (weight, scale) in enumerate(zip(parts.weights, parts.scales, strict=True)):
        bias = parts.biases[i] if parts.biases else None
        down, up = given[i], given[count + i]
        outs.append(F.linear(x, weight, bias) + scale * F.linear(F.linear(x, down), up))
    return torch.cat(outs, -1)


# ---- layers that read the same input ----


@pytest.mark.parametrize("sizes", [(12,), (10, 6), (10, 6, 4)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("joined", [False, True])
def test_it_is_the_sum_of_layer_and_adapter(
    sizes: tuple[int, ...], biased: bool, joined: bool
) -> None:
    parts, given = linears(sizes, biased, joined), adapters(sizes)
    x = normal(2, 7, INPUTS, seed=1).requires_grad_()
    got, want = lora_linear.lora_linear(parts, x, given), sum_of_modules(parts, x, given)
    torch.testing.assert_close(got, want)
    weigh = normal(*want.shape, seed=2)
    learned = [x, *given]
    found, meant = (torch.autograd.grad((y * weigh).sum(), learned) for y in (got, want))
    for a, b in zip(found, meant, strict=True):
        torch.testing.assert_close(a, b)


def test_an_input_that_is_not_learned_gets_no_gradient() -> None:
    parts, given = linears((10, 6), False, True), adapters((10, 6))
    lora_linear.lora_linear(parts, normal(7, INPUTS), given).sum().backward()
    assert all(part.grad is not None and part.grad.abs().sum() > 0 for part in given)


# ---- a gated MLP ----


def mlp() -> tuple[LoraLinears, LoraLinears, list[Tensor], Tensor]:
    wide, last = linears((16, 16), False, True), linears((INPUTS,), False, False, inputs=16)
    dtype = torch.float32  # of the kernels
    for parts in (wide, last):
        parts.weights = [w.to(dtype) for w in parts.weights]
        parts.whole = (parts.whole[0].to(dtype), None) if parts.whole else None
    given = [*adapters((16, 16)), *adapters((INPUTS,), inputs=16)]
    given = [part.detach().to(dtype).requires_grad_() for part in given]
    return wide, last, given, normal(1, 9, INPUTS, seed=1).to(dtype).requires_grad_()


@pytest.mark.parametrize("fused", [False, True])
def test_an_mlp_is_its_layers_and_keeps_gate_and_up_alone(
    fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide, last, given, x = mlp()
    if not fused:
        monkeypatch.setattr(lora_gate, "takes", lambda both, ranks: False)
    got = lora_mlp(wide, last, x, given)
    gate, up = sum_of_modules(wide, x, given[:4]).chunk(2, -1)
    want = sum_of_modules(last, F.silu(gate) * up, given[4:])
    near = {"atol": 2e-4, "rtol": 2e-4}
    torch.testing.assert_close(got, want, **near)
    kept = [tuple(part.shape) for part in got.grad_fn.saved_tensors]  # type: ignore[union-attr]
    assert kept[:4] == [(9, INPUTS), (9, 32), (9, 6), (9, 4)] and (9, 16) not in kept
    weigh = normal(*want.shape, seed=2).float()
    learned = [x, *given]
    found, meant = (torch.autograd.grad((y * weigh).sum(), learned) for y in (got, want))
    for a, b in zip(found, meant, strict=True):
        size = float(b.abs().max())
        torch.testing.assert_close(a, b, atol=1e-4 * size, rtol=1e-3)


# ---- in a model ----


def adapted(dtype: torch.dtype = torch.float32, arch: str = "qwen2", **keys: object) -> CausalModel:
    cfg = AdapterConfig.model_validate({"rank": 2, **keys})
    module = add_adapter(make_module(arch).to(DEVICE, dtype), cfg, seed=0)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if "lora_B" in name:
                weight.copy_(normal(*weight.shape, seed=len(name), dtype=torch.float32) / 4)
    return CausalModel(module)


@contextmanager
def as_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What was computed by the functions of this module, in a model of any precision."""
    seen: list[str] = []

    def counted(name: str, inner: object) -> object:
        def call(*args: object) -> object:
            seen.append(name)
            return inner(*args)  # type: ignore[operator]

        return call

    with monkeypatch.context() as patch:
        for module in (fused_linear, quick_mlp):
            patch.setattr(module, "takes_kernel", lambda x, weight: True)
        patch.setattr(lora_linear, "lora_linear", counted("layers", lora_linear.lora_linear))
        patch.setattr(quick_mlp, "lora_mlp", counted("mlp", lora_mlp))
        yield seen


def replaced(model: CausalModel) -> CausalModel:
    """With what a model on a GPU has."""
    replace_linears(model.module)
    quick_mlp.replace_mlps(model.module)
    return model


def same(a: tuple[Tensor, dict[str, Tensor]], b: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(a[0], b[0], atol=1e-5, rtol=1e-5)
    assert a[1].keys() == b[1].keys() and all("lora_" in name for name in a[1])
    assert len(a[1]) == 2 * 14
    for name, gradient in b[1].items():
        near = 1e-5 * max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(a[1][name], gradient, atol=near, rtol=1e-4)


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("recomputed", [False, True])
def test_a_model_learns_as_a_sum_of_modules(
    joined: bool, recomputed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = passed(adapted(), recomputed)
    model = replaced(adapted())
    if joined:
        assert join(model.module) == 4
    with as_in_16_bits(monkeypatch) as seen:
        same(passed(model, recomputed), want)
    # of each of two layers q/k/v, o and the MLP
    assert sorted(seen) == sorted(["layers", "layers", "mlp"] * 2 * (1 + recomputed))


@pytest.mark.parametrize("joined", [False, True])
def test_frozen_layers_in_fp8(joined: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probs of a sum of modules in FP8, gradients up to the rounding of those of layers that
    read the same input, and neither of them those without FP8.
    """
    found = []
    for fused in (False, True):
        model = replaced(adapted())
        layers = Fp8Layers.of(model, "train.precision")
        if not joined:
            separate(model.module)
        with layers.using("fresh"):
            if not fused:
                found.append(passed(model))
                continue
            with as_in_16_bits(monkeypatch) as seen:
                found.append(passed(model))
    assert sorted(seen) == sorted(["layers", "layers", "mlp"] * 2)
    (want, of_modules), (got, ours) = found
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    plain, of_plain = passed(adapted())
    assert not torch.allclose(got, plain, atol=1e-3)

    def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
        gaps = [float((a[name] - b[name]).norm() / b[name].norm()) for name in b]
        return max(gaps)

    assert apart(ours, of_modules) < 0.1
    assert apart(ours, of_plain) > 1e-3


def test_scoring_has_the_bits_of_training_and_engines_compute_for_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = replaced(adapted())
    batch = Batch.pack(make_samples([9, 5])).to(DEVICE)
    with as_in_16_bits(monkeypatch) as seen:
        with torch.no_grad():
            scored = model.logprobs(batch, temperature=1.0)[0]
        assert len(seen) == 6 and torch.equal(passed(model)[0], scored)
        seen.clear()
        with torch.no_grad(), decoding():
            model.logprobs(batch, temperature=1.0)
        assert not seen


def test_adapters_of_some_layers_and_dropout_keep_the_sum_of_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    some = replaced(adapted(targets=["q_proj", "v_proj", "up_proj"]))
    with as_in_16_bits(monkeypatch) as seen:
        passed(some)
    assert seen == ["layers"] * 3 * 2  # each alone
    drops = replaced(adapted(dropout=0.5))
    batch = Batch.pack(make_samples([9, 5])).to(DEVICE)
    drop_rows(drops.module, DroppedRows(batch, ("seed",)))
    with as_in_16_bits(monkeypatch) as seen:
        dropped = passed(drops)[0]
        assert not seen
        drop_rows(drops.module, None)
        assert not torch.equal(passed(drops)[0], dropped) and len(seen) == 6


@pytest.mark.parametrize("where", ["q_proj", "v_proj.base_layer", "v_proj.lora_A.default"])
def test_layers_with_hooks_compute_for_themselves(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = replaced(adapted())
    attention = model.layers[0].self_attn
    called: list[nn.Module] = []
    attention.get_submodule(where).register_forward_pre_hook(lambda part, _: called.append(part))
    with as_in_16_bits(monkeypatch) as seen:
        passed(model)
    # q, k and v of the first layer without the hooked one's family; k and q alone where they can
    assert seen.count("mlp") == 2 and len(seen) == 6 + 1
    assert called if where != "v_proj.lora_A.default" else True


def test_with_the_adapter_off_it_is_the_base(monkeypatch: pytest.MonkeyPatch) -> None:
    model = replaced(adapted())
    batch = Batch.pack(make_samples([9, 5])).to(DEVICE)
    with as_in_16_bits(monkeypatch) as seen, torch.no_grad():
        with model.module.disable_adapter():  # type: ignore[operator]
            off = model.logprobs(batch, temperature=1.0)[0]
        assert not seen
    base = CausalModel(make_module("qwen2").to(DEVICE))
    with torch.no_grad():
        want = base.logprobs(batch, temperature=1.0)[0]
    torch.testing.assert_close(off, want, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_gradients_in_bfloat16_are_as_near_to_those_of_float32() -> None:
    true = passed(adapted())

    def errors(model: CausalModel) -> list[float]:
        logprobs, grads = passed(model)
        pairs = [(logprobs, true[0]), *((grads[n], true[1][n]) for n in grads)]
        near = sum(float((a.float() - b).square().sum()) for a, b in pairs[1:])
        size = sum(float(b.square().sum()) for _, b in pairs[1:])
        gap = float((pairs[0][0].float() - pairs[0][1]).norm() / pairs[0][1].norm())
        return [gap, (near / size) ** 0.5]

    apart = adapted(torch.bfloat16)
    for part in apart.module.modules():
        if isinstance(getattr(vars(part).get("forward"), "__self__", None), quick_mlp.QuickMlp):
            del part.forward
        if hasattr(part, "lora_A"):
            part.forward = type(part).forward.__get__(part)
    ours, own = errors(adapted(torch.bfloat16)), errors(apart)
    assert all(a < 1.2 * b + 1e-3 for a, b in zip(ours, own, strict=True)), (ours, own)
