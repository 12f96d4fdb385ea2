# mypy: disable-error-code="no-untyped-def"
"""silu(gate)·up of two tensors as one kernel, and its gradients as another. Twin: what MLPs of
transformers compute, `models.quick_mlp.gated`.

Legend: N numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from reinforge.models.kernels.common import early

AT_ONCE = 2048


@triton.jit
def _silu_mul(GATE, UP, Y, N, EARLY: tl.constexpr, BN: tl.constexpr):
    """Rounded where transformers rounds: after silu, and after the product."""
    n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    gate = tl.load(GATE + n, mask=n < N, other=0.0)
    up = tl.load(UP + n, mask=n < N, other=0.0).to(tl.float32)
    dtype = gate.dtype
    gate = gate.to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(Y + n, (silu * up).to(dtype), mask=n < N)


@triton.jit
def _silu_mul_backward(GATE, UP, DY, DGATE, DUP, N, BN: tl.constexpr):
    n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    gate = tl.load(GATE + n, mask=n < N, other=0.0)
    dtype = gate.dtype
    gate = gate.to(tl.float32)
    up = tl.load(UP + n, mask=n < N, other=0.0).to(tl.float32)
    dy = tl.load(DY + n, mask=n < N, other=0.0).to(tl.float32)
    chance = 1.0 / (1.0 + tl.exp(-gate))
    dgate = dy * up * chance * (1.0 + gate * (1.0 - chance))
    tl.store(DGATE + n, dgate.to(dtype), mask=n < N)
    tl.store(DUP + n, (dy * gate * chance).to(dtype), mask=n < N)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Of contiguous tensors of one shape."""
    y = torch.empty_like(gate)
    if y.numel():
        grid = (triton.cdiv(y.numel(), AT_ONCE),)
        _silu_mul[grid](gate, up, y, y.numel(), BN=AT_ONCE, num_warps=4, **early())
    return y


def silu_mul_backward(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of both."""
    dgate = torch.empty_like(gate)
    dup = torch.empty_like(up)
    if dy.numel():
        grid = (triton.cdiv(dy.numel(), AT_ONCE),)
        _silu_mul_backward[grid](gate, up, dy, dgate, dup, dy.numel(), BN=AT_ONCE, num_warps=4)
    return dgate, dup
