# mypy: disable-error-code="no-untyped-def"
"""silu(gate)·up as one kernel, and its gradients as another. Twin: what MLPs of transformers
compute, `models.gates.gated`.

Legend: N rows, I numbers of each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from reinforge.models.kernels.common import ceil_div, early, next_power, rounded_silu

AT_ONCE = 2048


@triton.jit
def _piece(I, apart, BI: tl.constexpr):
    """Of this program: where its numbers lie, in rows that are so far `apart` and in rows end to
    end, and which of them are there.
    """
    pieces = tl.cdiv(I, BI)
    row = (tl.program_id(0) // pieces).to(tl.int64)
    i = tl.program_id(0) % pieces * BI + tl.arange(0, BI)
    return row * apart + i, row * I + i, i < I


@triton.jit
def _silu_mul(GATE, UP, Y, I, apart, EARLY: tl.constexpr, BI: tl.constexpr):
    """Rounded where transformers rounds: after silu, and after the product."""
    at, flat, there = _piece(I, apart, BI)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    gate = tl.load(GATE + at, mask=there, other=0.0)
    up = tl.load(UP + at, mask=there, other=0.0).to(tl.float32)
    silu = rounded_silu(gate.to(tl.float32), Y.dtype.element_ty).to(tl.float32)
    tl.store(Y + flat, (silu * up).to(Y.dtype.element_ty), mask=there)


@triton.jit
def _silu_mul_backward(GATE, UP, DY, DGATE, DUP, I, apart, BI: tl.constexpr):
    at, flat, there = _piece(I, apart, BI)
    gate = tl.load(GATE + at, mask=there, other=0.0)
    dtype = gate.dtype
    gate = gate.to(tl.float32)
    up = tl.load(UP + at, mask=there, other=0.0).to(tl.float32)
    dy = tl.load(DY + flat, mask=there, other=0.0).to(tl.float32)
    chance = 1.0 / (1.0 + tl.exp(-gate))
    dgate = dy * up * chance * (1.0 + gate * (1.0 - chance))
    tl.store(DGATE + at, dgate.to(dtype), mask=there)
    tl.store(DUP + at, (dy * gate * chance).to(dtype), mask=there)


def _launch(rows: Tensor) -> tuple[tuple[int], int]:
    """Programs, and numbers of each."""
    block = min(AT_ONCE, next_power(rows.shape[1]))
    return (rows.shape[0] * ceil_div(rows.shape[1], block),), block


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """[N, I] of two such, whose rows lie alike."""
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if y.numel():
        grid, block = _launch(gate)
        _silu_mul[grid](
            gate, up, y, gate.shape[1], gate.stride(0), BI=block, num_warps=4, **early()
        )
    return y


def silu_mul_backward(gate: Tensor, up: Tensor, dy: Tensor, dgate: Tensor, dup: Tensor) -> None:
    """Gradients of both, into tensors that lie as they do. dy [N, I], contiguous."""
    if dy.numel():
        grid, block = _launch(gate)
        _silu_mul_backward[grid](
            gate, up, dy, dgate, dup, gate.shape[1], gate.stride(0), BI=block, num_warps=4
        )
