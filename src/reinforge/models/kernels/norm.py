# mypy: disable-error-code="no-untyped-def"
"""RMS norms as one kernel. Twins: `models.norms`.

Legend: N rows, E numbers that are normed together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from reinforge.models.kernels.common import early


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
    rows = _rows(x)
    gates = rows if gate is None else _rows(gate.expand(x.shape))
    if gates.shape[1] != rows.shape[1]:
        rows, gates = (part.reshape(1, -1, size) for part in (rows, gates))
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
        BE=triton.next_power_of_2(size),
        num_warps=8 if size > 2048 else 4 if size > 512 else 1,
        **early(),
    )
    return y


def _rows(x: Tensor) -> Tensor:
    """x as [N, H, E] without a copy, where it lies so."""
    if x.ndim == 4 and x.shape[0] == 1:
        x = x[0]
    if x.ndim == 3 and x.stride(-1) == 1:
        return x
    return x.reshape(1, -1, x.shape[-1]).contiguous()
