"""Norms and gated MLPs as one kernel each way, against what transformers computes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3_5TextConfig, Qwen3Config
from transformers.models.glm import modeling_glm
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3_5 import modeling_qwen3_5

from reinforge.core.batch import Batch
from reinforge.core.sample import Sample
from reinforge.models import norms
from reinforge.models.causal import CausalModel
from reinforge.models.gates import gated, joint_gate, kernel_gate
from reinforge.models.joint_linear import JointWeights
from reinforge.models.quick_mlp import QuickMlp, gated_linear, is_gated
from reinforge.models.quick_norm import QuickNorm, kernel_norm
from reinforge.models.quick_rope import is_usual, kernel_rope, rotated

pytest.importorskip("triton")
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
EPS = 1e-6


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def formula(kind: str, x: Tensor, weight: Tensor, gate: Tensor | None) -> Tensor:
    if kind == "gated":
        assert gate is not None
        return norms.gated_norm(x, weight, EPS, gate)
    return {"plain": norms.rms_norm, "centred": norms.centred_norm}[kind](x, weight, EPS)


@pytest.mark.parametrize("kind", ["plain", "centred", "gated"])
@pytest.mark.parametrize(
    ("shape", "dtype"), [((37, 96), torch.float32), ((5, 3, 40), torch.float16)]
)
def test_a_norm_has_the_values_and_gradients_of_its_formula(
    kind: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    near = 1e-5 if dtype == torch.float32 else 4e-3
    x, gate, weights = (normal(*shape, seed=i).to(dtype) for i in range(3))
    weight = normal(shape[-1], seed=3).to(dtype)
    gates = gate if kind == "gated" else None
    mine = [t.clone().requires_grad_() for t in (x, weight, gate)]
    got = kernel_norm(
        mine[0],
        mine[1],
        EPS,
        centred=kind == "centred",
        gate=mine[2] if gates is not None else None,
    )
    wide = [t.double().requires_grad_() for t in (x, weight, gate)]
    true = wide[0] * torch.rsqrt(wide[0].pow(2).mean(-1, keepdim=True) + EPS)
    true = true * (1 + wide[1] if kind == "centred" else wide[1])
    if kind == "gated":
        true = true * torch.nn.functional.silu(wide[2])
    torch.testing.assert_close(got, formula(kind, x, weight, gates), rtol=near, atol=near)
    (got * weights).sum().backward()
    (true * weights).sum().backward()
    for one, two in zip(mine[: 3 if kind == "gated" else 2], wide, strict=False):
        assert one.grad is not None and two.grad is not None
        error = (one.grad.double() - two.grad).norm() / two.grad.norm()
        assert error < near


def test_rows_may_lie_apart_and_a_frozen_weight_has_no_gradient() -> None:
    whole = normal(6, 4, 48)
    x = whole[:, 1:3, :32].requires_grad_()
    weight = normal(32, seed=1)
    (near,) = torch.autograd.grad(kernel_norm(x, weight, EPS).pow(2).sum(), x)
    (want,) = torch.autograd.grad(norms.rms_norm(x, weight, EPS).pow(2).sum(), x)
    torch.testing.assert_close(near, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("count", [1, 3000])
def test_a_gate_has_the_values_and_gradients_of_its_formula(count: int) -> None:
    parts = [normal(3, count, seed=i).requires_grad_() for i in range(2)]
    weights = normal(3, count, seed=2)
    got, want = kernel_gate(*parts), gated(*parts)
    torch.testing.assert_close(got, want)
    found = torch.autograd.grad((got * weights).sum(), parts)
    for one, two in zip(found, torch.autograd.grad((want * weights).sum(), parts), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [16, 12])
@pytest.mark.parametrize("heads", [(3, 1), (5, 5)])
def test_a_rope_has_the_values_and_gradients_of_its_formula(
    size: int, heads: tuple[int, int]
) -> None:
    both = [
        normal(7, n, 20, seed=n)[None, :, :, :16].transpose(1, 2).requires_grad_() for n in heads
    ]
    cos, sin = normal(2, 1, 7, size, seed=1)
    weights = [normal(1, n, 7, 16, seed=2) for n in heads]
    got = kernel_rope(*both, cos, sin)
    want = [rotated(x, cos, sin) for x in both]
    for one, two in zip(got, want, strict=True):
        torch.testing.assert_close(one, two)
    found, true = (torch.autograd.grad(out, both, weights) for out in (got, want))
    for one, two in zip(found, true, strict=True):
        torch.testing.assert_close(one, two)


def test_a_rope_of_which_only_the_queries_are_used() -> None:
    q, k = (normal(1, n, 5, 8, seed=n).requires_grad_() for n in (2, 1))
    cos, sin = normal(2, 1, 5, 8, seed=1)
    (mine,) = torch.autograd.grad(kernel_rope(q, k, cos, sin)[0].sum(), q)
    (true,) = torch.autograd.grad(rotated(q, cos, sin).sum(), q)
    torch.testing.assert_close(mine, true)


def test_ropes_are_found_by_what_they_compute() -> None:
    assert is_usual(modeling_qwen2.apply_rotary_pos_emb)
    assert is_usual(modeling_qwen3_5.apply_rotary_pos_emb)
    assert not is_usual(modeling_glm.apply_rotary_pos_emb)  # pairs of neighbours


@pytest.mark.parametrize("rows", [1, 5, 67])
@pytest.mark.parametrize("size", [40, 896, 3000])
def test_a_program_of_a_gradient_has_several_tiles_of_rows(
    rows: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against float64: the last tile of a program is that of another, and the last of all has rows
    that are not there; more parts of the weight's gradient than are fetched at once.
    """
    from reinforge.models.kernels import norm as kernels

    monkeypatch.setattr(kernels, "SUM_TILE", 16)  # two parts of eight columns
    tile = kernels.BackwardTile(rows=2, warps=4, ahead=3, programs=9)
    monkeypatch.setattr(kernels.BackwardTile, "of", lambda size: tile)
    parts = [normal(rows, size).requires_grad_(), normal(size, seed=1).requires_grad_()]
    weights = normal(rows, size, seed=2)
    found = torch.autograd.grad((kernel_norm(*parts, EPS) * weights).sum(), parts)
    x, weight = (part.detach().double().requires_grad_() for part in parts)
    true = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight
    want = torch.autograd.grad((true * weights).sum(), (x, weight))
    for one, two in zip(found, want, strict=True):
        torch.testing.assert_close(one.double(), two, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "heads"),
    [((5, 24), 1), ((1, 5, 24), 1), ((1, 5, 3, 24), 1), ((4, 5, 24), 1), ((1, 4, 5, 24), 5)],
    ids=str,
)
def test_rows_that_are_equally_far_apart_are_one_dimension(
    shape: tuple[int, ...], heads: int
) -> None:
    """The kernels divide a row's number by that of heads where these lie apart. The last shape is
    a slice of wider rows of heads.
    """
    from reinforge.models.kernels.norm import _rows_of_both

    wide = normal(*shape[:-2], 2 * shape[-2] if heads > 1 else shape[-2], shape[-1])
    x = wide[..., : shape[-2], :]
    rows, _ = _rows_of_both(x, None)
    assert rows.shape == (x.numel() // 24 // heads, heads, 24)
    assert rows.data_ptr() == x.data_ptr()
    assert torch.equal(rows.reshape(x.shape), x)


def test_sums_over_rows_have_the_same_bits_twice() -> None:
    rows = 4000 if ON_GPU else 40  # the interpreter takes its time for each program
    x, weight, weights = normal(rows, 64), normal(64, seed=1), normal(rows, 64, seed=2)

    def grads() -> list[Tensor]:
        parts = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        return list(torch.autograd.grad((kernel_norm(*parts, EPS) * weights).sum(), parts))

    assert all(torch.equal(a, b) for a, b in zip(grads(), grads(), strict=True))


def test_a_joint_gate_is_that_of_its_halves() -> None:
    x = normal(7, 2 * 33).requires_grad_()
    weights = normal(7, 33, seed=1)
    got, want = joint_gate(x), gated(*x.chunk(2, -1))
    torch.testing.assert_close(got, want)
    (mine,) = torch.autograd.grad((got * weights).sum(), x)
    (true,) = torch.autograd.grad((want * weights).sum(), x)
    torch.testing.assert_close(mine, true, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_gate_of_a_joint_product_is_that_of_two(in_memory: bool) -> None:
    x = normal(1, 7, 16).requires_grad_()
    weights = [normal(24, 16, seed=i).requires_grad_() for i in (1, 2)]
    biases = [normal(24, seed=i).requires_grad_() for i in (3, 4)]
    joint = JointWeights(weights, biases, [24, 24])
    if in_memory:
        joint.whole = torch.cat(weights).detach(), torch.cat(biases).detach()
    scale = normal(1, 7, 24, seed=5)
    got = gated_linear(joint, x)
    want = gated(*(F.linear(x, *part) for part in zip(weights, biases, strict=True)))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    learned = [x, *weights, *biases]
    found = torch.autograd.grad((got * scale).sum(), learned)
    for one, two in zip(found, torch.autograd.grad((want * scale).sum(), learned), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


class Odd(nn.Module):
    """An MLP with the names of a gated one and another formula."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = self.up_proj = self.down_proj = nn.Linear(8, 8)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * (self.up_proj(x) + 1))


def test_gated_mlps_are_found_by_what_they_compute() -> None:
    config = Qwen2Config(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=8,
    )
    mlp = AutoModelForCausalLM.from_config(config).model.layers[0].mlp
    assert is_gated(mlp)
    assert not is_gated(Odd())
    mlp.act_fn = nn.GELU()
    assert not is_gated(mlp)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("kind", [Qwen2Config, Qwen3Config, Qwen3_5TextConfig])
def test_a_model_trains_with_them_as_without(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients in bfloat16 are as far from those of float32 as transformers' own are."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    if kind is Qwen3_5TextConfig:
        heads |= {"linear_num_key_heads": 4, "linear_num_value_heads": 4}
        heads |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
    config = kind(vocab_size=500, **sizes, **heads)
    first = AutoModelForCausalLM.from_config(config).to("cuda")
    tokens = torch.randint(0, 500, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    sample = Sample.from_tokens("a", tokens, [False] * 10 + [True] * 80)

    def gradients(dtype: torch.dtype, quick: bool) -> Tensor:
        module = AutoModelForCausalLM.from_config(config)
        module.load_state_dict(first.state_dict())
        model = CausalModel(module.to("cuda", dtype))
        counts = {QuickNorm: 0, QuickMlp: 0}
        for part in model.module.modules():
            owner = type(getattr(vars(part).get("forward"), "__self__", None))
            counts[owner] = counts.get(owner, 0) + 1
            if owner in (QuickNorm, QuickMlp) and not quick:
                del part.forward
        assert counts[QuickNorm] >= 9 and counts[QuickMlp] == 4
        logprobs = model.logprobs(Batch.pack([sample]).to(model.device), temperature=1.0)[0]
        logprobs.float().sum().backward()
        return torch.cat([p.grad.flatten().float() for p in model.module.parameters()])

    true = gradients(torch.float32, quick=False)
    own, ours = (gradients(torch.bfloat16, quick=quick) for quick in (False, True))
    errors = [float((found - true).norm() / true.norm()) for found in (own, ours)]
    assert errors[1] < 1.2 * errors[0] + 1e-3, errors
    assert not torch.equal(own, ours)  # they are not the same kernels
