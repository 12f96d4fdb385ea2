# mypy: disable-error-code="no-untyped-def"
"""RMS norms as one kernel, and their gradients as another. Twins: `models.norms`.

Legend: N rows, E numbers that are normed together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from reinforge.models.kernels.common import MULTIPROCESSORS, ceil_div, early, next_power

PARTS = 8 * MULTIPROCESSORS  # programs that share the rows of a gradient


@triton.jit
def _rms_norm(
    X,
    GATE,
    WEIGHT,
    Y,
    E,
    H,
    x_n,
    x_h,
    g_n,
    g_h,
    eps,
    CENTRED: tl.constexpr,
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
    BE: tl.constexpr,
):
    """One program per row; rounded where transformers rounds."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BE)
    there = e < E
    weight = tl.load(WEIGHT + e, mask=there, other=0.0).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(X + row // H * x_n + row % H * x_h + e, mask=there, other=0.0)
    dtype = x.dtype
    wide = x.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / E + eps)
    if CENTRED:
        y = normed * (1.0 + weight)
    else:
        y = (weight * normed.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    if GATED:
        gate = tl.load(GATE + row // H * g_n + row % H * g_h + e, mask=there, other=0.0)
        gate = gate.to(tl.float32)
        y = y * (gate / (1.0 + tl.exp(-gate)))
    tl.store(Y + row * E + e, y.to(dtype), mask=there)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, centred: bool = False, gate: Tensor | None = None
) -> Tensor:
    """Of x [..., E]; `centred`: the weight is what is added to 1. `gate`, of the shape of x: the
    norm is multiplied by its silu.
    """
    size = x.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    rows, gates = _rows_of_both(x, gate)
    _rms_norm[(y.numel() // size,)](
        rows,
        gates,
        weight,
        y,
        size,
        rows.shape[1],
        rows.stride(0),
        rows.stride(1),
        gates.stride(0),
        gates.stride(1),
        eps,
        CENTRED=centred,
        GATED=gate is not None,
        BE=next_power(size),
        num_warps=8 if size > 2048 else 4 if size > 512 else 1,
        **early(),
    )
    return y


@triton.jit
def _rms_norm_backward(
    X,
    GATE,
    WEIGHT,
    DY,
    DX,
    DGATE,
    DWEIGHT,
    N,
    E,
    H,
    each,
    x_n,
    x_h,
    g_n,
    g_h,
    eps,
    CENTRED: tl.constexpr,
    GATED: tl.constexpr,
    WEIGHS: tl.constexpr,
    BN: tl.constexpr,
    BE: tl.constexpr,
):
    """One program for `each` rows, BN at a time. With n = x·r, r = 1 / sqrt(mean(x²) + eps) and
    h = w·∂y: ∂x = r·(h - n·mean(h·n)); DWEIGHT [programs, E] are sums of ∂y·n, if it WEIGHS.
    """
    first = tl.program_id(0) * each
    e = tl.arange(0, BE)
    weight = tl.load(WEIGHT + e, mask=e < E, other=0.0).to(tl.float32)
    scale = 1.0 + weight if CENTRED else weight
    total = tl.zeros([BE], tl.float32)
    for begin in range(first, first + each, BN):
        row = (begin + tl.arange(0, BN)).to(tl.int64)
        there = ((row < N) & (row < first + each))[:, None] & (e < E)[None, :]
        flat = row[:, None] * E + e[None, :]
        x_at = (row // H * x_n + row % H * x_h)[:, None] + e[None, :]
        x = tl.load(X + x_at, mask=there, other=0.0)
        dtype = x.dtype
        x = x.to(tl.float32)
        dy = tl.load(DY + flat, mask=there, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(x * x, 1) / E + eps)[:, None]
        normed = x * inverse
        if GATED:
            g_at = (row // H * g_n + row % H * g_h)[:, None] + e[None, :]
            gate = tl.load(GATE + g_at, mask=there, other=0.0).to(tl.float32)
            chance = 1.0 / (1.0 + tl.exp(-gate))
            slope = chance * (1.0 + gate * (1.0 - chance))
            dgate = dy * normed * scale[None, :] * slope
            tl.store(DGATE + flat, dgate.to(DGATE.dtype.element_ty), mask=there)
            dy = dy * gate * chance
        if WEIGHS:
            total += tl.sum(dy * normed, 0)
        h = dy * scale[None, :]
        dx = inverse * (h - normed * (tl.sum(h * normed, 1) / E)[:, None])
        tl.store(DX + flat, dx.to(dtype), mask=there)
    if WEIGHS:
        tl.store(DWEIGHT + tl.program_id(0) * E + e, total, mask=e < E)


def rms_norm_backward(
    x: Tensor,
    weight: Tensor,
    eps: float,
    dy: Tensor,
    *,
    centred: bool = False,
    gate: Tensor | None = None,
    weighs: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, of the weight (if it `weighs`) and of the gate. Sums over rows are those of
    parts that depend on nothing but their number.
    """
    size = x.shape[-1]
    count = x.numel() // size
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dgate = None if gate is None else torch.empty(x.shape, dtype=gate.dtype, device=x.device)
    block = next_power(size)
    at_once = max(1, 2048 // block)
    each = ceil_div(ceil_div(max(count, 1), PARTS), at_once) * at_once
    programs = ceil_div(count, each)
    sums = torch.empty(programs if weighs else 0, size, dtype=torch.float32, device=x.device)
    if count:
        rows, gates = _rows_of_both(x, gate)
        _rms_norm_backward[(programs,)](
            rows,
            gates,
            weight,
            dy.contiguous(),
            dx,
            dx if dgate is None else dgate,
            sums,
            count,
            size,
            rows.shape[1],
            each,
            rows.stride(0),
            rows.stride(1),
            gates.stride(0),
            gates.stride(1),
            eps,
            CENTRED=centred,
            GATED=gate is not None,
            WEIGHS=weighs,
            BN=at_once,
            BE=block,
            num_warps=16 if size > 4096 else 8 if size > 2048 else 4,
        )
    return dx, sums.sum(0).to(weight.dtype) if weighs else None, dgate


def _rows_of_both(x: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor]:
    """x and gate as [N, H, E] with the same H; without a gate x twice."""
    rows = _rows(x)
    gates = rows if gate is None else _rows(gate.expand(x.shape))
    if gates.shape[1] != rows.shape[1]:
        rows, gates = (part.reshape(1, -1, x.shape[-1]) for part in (rows, gates))
    return rows, gates


def _rows(x: Tensor) -> Tensor:
    """x as [N, H, E] without a copy, where it lies so."""
    if x.ndim == 4 and x.shape[0] == 1:
        x = x[0]
    if x.ndim == 3 and x.stride(-1) == 1:
        return x
    return x.reshape(1, -1, x.shape[-1]).contiguous()
