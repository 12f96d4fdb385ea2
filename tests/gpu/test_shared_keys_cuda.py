"""Gradients of keys and values of a shared prompt, added up by one kernel, against float64 and
against torch's own.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from helpers.determinism import deterministic
from reinforge.models.attention import PackedLayout, starts_of
from reinforge.models.attention_rule import AttentionRule
from reinforge.models.shared_keys import SharedKeys

pytest.importorskip("triton")
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# prompts of several tiles, one that no answer continues, and more answers than places at once
LENGTHS = [19, 7, 3, 11, 5, 4, 6, 2, 20]
PREFIX = [-1, 0, 0, 0, -1, 0, 0, 0, 4]
if ON_GPU:
    LENGTHS = [64 * n for n in LENGTHS]
# heads, numbers of a key, numbers of a value
SHAPES = [(2, 64, 64), (3, 24, 16), (2, 96, 128)]
# the interpreter cuts numbers off to bfloat16, where a GPU rounds them
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]


def normal(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return made.to(DEVICE, dtype)


def gathered(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> tuple[SharedKeys, list[Tensor], tuple[Tensor, ...]]:
    """The tables, the gradients of the copies, and those of keys and values."""
    shared = SharedKeys.of(LENGTHS, PREFIX, DEVICE, has_kernel=True)
    heads, *sizes = shape
    # heads before tokens, as a model has them
    inputs = [
        normal(heads, sum(LENGTHS), size, seed=i, dtype=dtype).transpose(0, 1).requires_grad_()
        for i, size in enumerate(sizes)
    ]
    found = shared.gather(*inputs)
    for x, copies in zip(inputs, found, strict=True):
        assert torch.equal(copies, x.index_select(0, shared.index))
        assert "_Gather" in type(copies.grad_fn).__name__
    grads = [normal(*x.shape, seed=2 + i, dtype=dtype) for i, x in enumerate(found)]
    return shared, grads, torch.autograd.grad(found, inputs, grads)


def in_order(grads: Tensor, shared: SharedKeys) -> Tensor:
    """Sums in float32, place after place."""
    total = torch.zeros(sum(LENGTHS), *grads.shape[1:])
    for token, grad in zip(shared.index.tolist(), grads.float().cpu(), strict=True):
        total[token] += grad
    return total.to(grads.device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_are_those_of_float64_and_rounded_once(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    shared, grads, found = gathered(shape, dtype)
    for grad, ours in zip(grads, found, strict=True):
        assert ours.dtype == dtype and ours.is_contiguous()
        wide = torch.zeros(ours.shape, dtype=torch.float64, device=DEVICE)
        wide.index_add_(0, shared.index, grad.double())
        near = 0.51 * torch.finfo(dtype).eps
        torch.testing.assert_close(ours.double(), wide, rtol=near, atol=4e-6)
        assert torch.equal(ours, in_order(grad, shared).to(dtype))


def test_the_same_bits_twice() -> None:
    first, *others = (gathered(SHAPES[0], torch.bfloat16)[2] for _ in range(4 if ON_GPU else 2))
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


def test_one_of_them_alone_may_have_a_gradient() -> None:
    shared = SharedKeys.of([2, 1, 1], [-1, 0, 0], DEVICE, has_kernel=True)
    k, v = (torch.ones(4, 1, 2, device=DEVICE) for _ in range(2))
    v.requires_grad_()
    (grad,) = torch.autograd.grad(shared.gather(k, v)[1].sum(), v)
    assert grad[:, 0, 0].tolist() == [3, 3, 1, 1]


@pytest.mark.parametrize("sizes", [(16, 16), (24, 16)], ids=str)
def test_attention_trains_with_it_as_without(sizes: tuple[int, int]) -> None:
    """In bfloat16 on a GPU (float32 elsewhere), as near to float32 as torch's own gather."""
    narrow = torch.bfloat16 if ON_GPU else torch.float32
    layout = PackedLayout(LENGTHS, starts_of(LENGTHS, DEVICE), PREFIX)
    assert layout.shared is not None and layout.shared.has_kernel == ON_GPU

    def gradients(dtype: torch.dtype, kernel: bool) -> list[Tensor]:
        layout.shared = replace(layout.shared, has_kernel=kernel)
        shapes = ((4, sizes[0]), (2, sizes[0]), (2, sizes[1]))
        q, k, v = (
            normal(sum(LENGTHS), *shape, seed=i, dtype=narrow).to(dtype).requires_grad_()
            for i, shape in enumerate(shapes)
        )
        out = layout.attend(0, q, k, v, AttentionRule(0.25))
        weights = normal(*out.shape, seed=3, dtype=narrow).to(dtype)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), weights)]

    true = gradients(torch.float32, kernel=False)
    with deterministic():
        own, ours = (gradients(narrow, kernel=kernel) for kernel in (False, True))
    assert torch.equal(own[0], ours[0]) and torch.equal(own[1], ours[1])
    for plain, mine, want in zip(own[2:], ours[2:], true[2:], strict=True):
        errors = [float((x.float() - want).norm() / want.norm()) for x in (plain, mine)]
        assert errors[1] < 1.1 * errors[0] + 1e-6, errors
