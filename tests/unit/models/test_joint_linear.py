"""q, k and v, gate and up as one product with a gradient: the numbers of the layers alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.passes import passed
from helpers.toys import make_model, make_samples
from reinforge.core.batch import Batch
from reinforge.models import fp8, fp8_layers, fused_linear, quick_mlp
from reinforge.models.causal import CausalModel
from reinforge.models.decoding import decoding
from reinforge.models.fp8 import Fp8Rows
from reinforge.models.fp8_layers import Fp8Layers
from reinforge.models.fused_linear import FusedLinear, fused_part, join, replace_linears, separate
from reinforge.models.gates import gated
from reinforge.models.joint_linear import JointWeights, joint_linear
from reinforge.models.quick_mlp import QuickMlp

SIZES = (6, 2, 4)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw, dtype=dtype).requires_grad_()


def parameters(biased: bool, dtype: torch.dtype = torch.float64) -> JointWeights:
    weights = [normal(n, 5, seed=n, dtype=dtype) for n in SIZES]
    biases = [normal(n, seed=10 + n, dtype=dtype) for n in SIZES] if biased else []
    return JointWeights(weights, biases, list(SIZES))


# ---- the product ----


@pytest.mark.parametrize("biased", [False, True])
def test_its_gradients_are_those_of_differences(biased: bool) -> None:
    joint = parameters(biased)

    def product(x: Tensor, *given: Tensor) -> Tensor:
        return joint_linear(JointWeights(list(given[:3]), list(given[3:]), joint.sizes), x)

    assert torch.autograd.gradcheck(product, (normal(2, 3, 5), *joint.weights, *joint.biases))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("in_memory", [False, True])
def test_it_is_the_layers_side_by_side(biased: bool, in_memory: bool) -> None:
    joint = parameters(biased, torch.float32)
    weights, biases = joint.weights, joint.biases
    x = normal(1, 7, 5, dtype=torch.float32)
    if in_memory:
        joint.whole = torch.cat(weights).detach(), torch.cat(biases).detach() if biased else None
    got = joint_linear(joint, x)
    pairs = zip(weights, biases or [None] * 3, strict=True)
    want = torch.cat([F.linear(x, weight, bias) for weight, bias in pairs], -1)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)
    scale = normal(1, 7, sum(SIZES), seed=3, dtype=torch.float32).detach()
    learned = [x, *weights, *biases]
    found = torch.autograd.grad((got * scale).sum(), learned)
    for a, b in zip(found, torch.autograd.grad((want * scale).sum(), learned), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_gradients_are_rows_of_one_tensor_and_not_copied() -> None:
    joint = parameters(biased=True)
    x = normal(7, 5)
    joint_linear(joint, x).square().sum().backward()
    for family in (joint.weights, joint.biases):
        grads = [p.grad for p in family]
        assert len({g.untyped_storage().data_ptr() for g in grads}) == 1
        assert all(g.is_contiguous() for g in grads)
        after = [g.data_ptr() + g.nbytes for g in grads]
        assert after[:-1] == [g.data_ptr() for g in grads[1:]]
    first = [p.grad.clone() for p in joint.weights]
    joint_linear(joint, x).square().sum().backward()  # added to where they lie
    for p, once in zip(joint.weights, first, strict=True):
        torch.testing.assert_close(p.grad, 2 * once)


def test_what_is_frozen_gets_no_gradient_and_keeps_no_input() -> None:
    joint = parameters(biased=True)
    weights, biases = joint.weights, joint.biases
    for p in (*weights, *biases):
        p.requires_grad_(False)
    y = joint_linear(joint, normal(7, 5))
    saved = y.grad_fn.saved_tensors  # type: ignore[union-attr]
    assert saved[0] is None and len(saved) == 4
    weights[1].requires_grad_()  # one of three
    joint_linear(joint, normal(7, 5)).sum().backward()
    assert weights[1].grad is not None and weights[0].grad is None and biases[0].grad is None


# ---- in a model ----


@contextmanager
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, on: bool = True) -> Iterator[list[Tensor]]:
    """Inputs that were multiplied jointly."""
    seen: list[Tensor] = []

    def counted(joint: JointWeights, x: Tensor) -> Tensor:
        seen.append(x)
        return joint_linear(joint, x)

    with monkeypatch.context() as patch:
        patch.setattr(fused_linear, "takes_kernel", lambda x, weight: on)
        patch.setattr(fused_linear, "joint_linear", counted)
        yield seen


def same(a: tuple[Tensor, dict[str, Tensor]], b: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(a[0], b[0], atol=1e-6, rtol=1e-6)
    assert a[1].keys() == b[1].keys() and len(a[1]) > 8
    for name, gradient in b[1].items():
        near = 1e-6 * max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(a[1][name], gradient, atol=near, rtol=1e-5)


@pytest.mark.parametrize("arch", ["qwen2", "llama", "qwen3", "qwen3_5"])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("recomputed", [False, True])
def test_a_model_trains_with_joint_products_as_without(
    arch: str, joined: bool, recomputed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = passed(make_model(arch), recomputed)
    model = make_model(arch)
    families = replace_linears(model.module)
    assert families == (3 if arch == "qwen3_5" else 4)  # of two layers; a delta net has none
    if joined:
        join(model.module)
    with as_on_a_gpu(monkeypatch) as seen:
        same(passed(model, recomputed), want)
    assert len(seen) == families * (1 + recomputed)
    assert all(joint.kept is None for joint in joints(model))


def joints(model: CausalModel) -> list[FusedLinear]:
    parts = (fused_part(part) for part in model.module.modules())
    return [part.joint for part in parts if part is not None]


def test_scoring_has_the_bits_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("qwen2")
    join(model.module)
    batch = Batch.pack(make_samples([9, 5]))
    with as_on_a_gpu(monkeypatch) as seen:
        with torch.no_grad():
            old = model.logprobs(batch, temperature=1.0)[0]
        assert len(seen) == 4
        assert torch.equal(passed(model)[0], old) and len(seen) == 8
        with torch.no_grad(), decoding():
            model.logprobs(batch, temperature=1.0)
        assert len(seen) == 8  # an engine has its own


def test_weights_that_were_replaced_are_the_ones_that_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model("qwen2")
    join(model.module)
    for p in model.module.parameters():  # without a word to the joint tensor
        p.data = p.data * 1.1
    assert joints(model)[0].whole([layer.weight for layer in joints(model)[0].layers]) is None
    with as_on_a_gpu(monkeypatch, on=False):
        want = passed(model)
    with as_on_a_gpu(monkeypatch):
        same(passed(model), want)
    assert separate(model.module) == 4 == join(model.module)
    assert joints(model)[0].whole([layer.weight for layer in joints(model)[0].layers]) is not None


# ---- what the layers hand out ----


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(5, n) for n in SIZES)


def test_a_product_is_handed_out_once_and_for_its_own_input(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part = Attention()
    assert replace_linears(part) == 1 == replace_linears(part)
    x, other = normal(3, 5, dtype=torch.float32), normal(3, 5, seed=1, dtype=torch.float32)
    with as_on_a_gpu(monkeypatch) as seen:
        part.k_proj(x), part.v_proj(x)  # before any product
        assert not seen
        q = part.q_proj(x)
        for given in (other, x.clone()):
            torch.testing.assert_close(
                part.k_proj(given), F.linear(given, *part.k_proj.parameters())
            )
        k, v = part.k_proj(x), part.v_proj(x)
        assert len({piece.untyped_storage().data_ptr() for piece in (q, k, v)}) == 1
        again = part.v_proj(x)
        assert again.data_ptr() != v.data_ptr() and len(seen) == 1
        torch.testing.assert_close(again, v)
        q.clamp_(min=0.0)  # as OLMo does
        (q.sum() + k.sum()).backward()
        seen.clear()
    assert part.v_proj.weight.grad is not None and not part.v_proj.weight.grad.any()
    gone = weakref.ref(x)
    del x, q, k, v, again, given
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
def test_layers_with_hooks_compute_for_themselves(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook may bring the weights of its layer alone."""
    part = Attention()
    replace_linears(part)
    x = normal(3, 5, dtype=torch.float32)
    with as_on_a_gpu(monkeypatch) as seen:
        hook = getattr(part.v_proj, f"register_{kind}_hook")(lambda *_: None)
        part.q_proj(x)
        assert not seen
        hook.remove()
        part.q_proj(x)
        assert len(seen) == 1


def test_large_weights_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_linear, "LARGEST", sum(SIZES) * 5 - 1)
    part = Attention()
    join(part)
    with as_on_a_gpu(monkeypatch) as seen, torch.no_grad():
        part.q_proj(normal(3, 5, dtype=torch.float32))
    assert not seen and fused_part(part.q_proj).joint.kept is None  # type: ignore[union-attr]


# ---- gated MLPs ----


def test_gate_and_up_are_one_product_in_fp8_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("qwen2")
    replace_linears(model.module)
    layers = Fp8Layers.of(model, "train.precision")
    mlp = model.layers[0].mlp
    x = normal(1, 7, 32, dtype=torch.float32)
    gates: list[JointWeights] = []

    def gated_linear(joint: JointWeights, x: Tensor) -> Tensor:
        gates.append(joint)
        return gated(*joint_linear(joint, x).chunk(2, -1))

    monkeypatch.setattr(quick_mlp, "gated_linear", gated_linear)
    monkeypatch.setattr(quick_mlp, "kernel_gate", gated)
    monkeypatch.setattr(quick_mlp, "takes_kernel", lambda x, weight: True)
    with as_on_a_gpu(monkeypatch):
        plain = QuickMlp(mlp).forward(x)
        torch.testing.assert_close(plain, mlp(x), atol=1e-6, rtol=1e-5)
        assert [joint.in_fp8 for joint in gates] == [False]
        with layers.using("fresh"):
            rounded = QuickMlp(mlp).forward(x)
            torch.testing.assert_close(rounded, mlp(x), atol=1e-6, rtol=1e-5)
        assert [joint.in_fp8 for joint in gates] == [False, True]
        assert not torch.allclose(rounded, plain, rtol=1e-3)
        with torch.no_grad(), decoding():  # an engine has its own
            QuickMlp(mlp).forward(x)
        mlp.up_proj.register_forward_pre_hook(lambda *_: None)
        QuickMlp(mlp).forward(x)
        with layers.using("fresh"):
            QuickMlp(mlp).forward(x)
        assert len(gates) == 2


@pytest.mark.parametrize("joined", [False, True])
def test_layers_that_read_the_same_input_quantise_it_once(
    monkeypatch: pytest.MonkeyPatch, joined: bool
) -> None:
    """Outputs and gradients of weights are those of each layer by itself; the gradient of the input
    is that of the joint product.
    """
    model = make_model("qwen2")
    replace_linears(model.module)
    layers = Fp8Layers.of(model, "train.precision")
    if not joined:
        separate(model.module)
    attention = model.layers[0].self_attn
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    outputs = sum(len(part.weight) for part in parts)
    draw = torch.Generator().manual_seed(3)
    grads = [torch.randn(1, 7, len(part.weight), generator=draw) for part in parts]
    x0 = torch.randn(1, 7, 32, generator=draw)
    quantised: list[tuple[int, ...]] = []
    of = Fp8Rows.of

    def noted(x: Tensor) -> Fp8Rows:
        quantised.append(tuple(x.shape))
        return of(x)

    monkeypatch.setattr(Fp8Rows, "of", noted)

    def passed() -> list[Tensor]:
        quantised.clear()
        x = x0.clone().requires_grad_()
        outs = [part(x) for part in parts]
        learned = [x, *(numbers for part in parts for numbers in (part.weight, part.bias))]
        return [*torch.autograd.grad(outs, learned, grads), *(out.detach() for out in outs)]

    with layers.using("fresh"):
        _, *alone = passed()
        assert quantised.count((7, 32)) == len(parts) + 1  # the gradient of q is as wide as x
        with as_on_a_gpu(monkeypatch):
            dx, *joint = passed()
    assert quantised.count((7, 32)) == quantised.count((7, outputs)) == 1
    for mine, other in zip(joint, alone, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)
    weight = torch.cat([part.weight.detach() for part in parts])
    want = fp8.input_gradient(torch.cat(grads, -1)[0], [weight])
    torch.testing.assert_close(dx[0], want, atol=1e-5, rtol=1e-5)


def test_a_layer_by_itself_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    layers = Fp8Layers.of(model, "train.precision")
    down = model.layers[0].mlp.down_proj
    x = normal(3, down.in_features, dtype=torch.float32)
    made: list[JointWeights] = []

    def joint(weights: JointWeights, x: Tensor) -> Tensor:
        made.append(weights)
        return joint_linear(weights, x)

    monkeypatch.setattr(fp8_layers, "joint_linear", joint)
    with as_on_a_gpu(monkeypatch), layers.using("fresh"):
        got = down(x)
    assert len(made) == 1 and made[0].weights[0] is down.weight
    assert vars(down)["forward"].__self__.family.kept is None
    torch.testing.assert_close(got, fp8.linear(x, down.weight, None))
