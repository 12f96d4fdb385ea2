# mypy: disable-error-code="no-untyped-def"
"""Rotary embedding of queries or keys as one kernel, and its gradient as the same one turned back.
Twin: `models.quick_rope.rotated`.

Legend: N tokens, H heads, D numbers of a head, of which the first R are turned.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from reinforge.models.kernels.common import early


@triton.jit
def _turn(
    X,
    COS,
    SIN,
    Y,
    H,
    D,
    R,
    x_n,
    x_h,
    BACK: tl.constexpr,
    EARLY: tl.constexpr,
    BH: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
):
    """One program per token; forward rounds where transformers rounds. BACK: the gradient."""
    n = tl.program_id(0).to(tl.int64)
    half = R // 2
    r = tl.arange(0, BR)
    turned = r < half
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    cos_low = tl.load(COS + n * R + r, mask=turned, other=0.0).to(tl.float32)[None, :]
    cos_high = tl.load(COS + n * R + half + r, mask=turned, other=0.0).to(tl.float32)[None, :]
    sin_low = tl.load(SIN + n * R + r, mask=turned, other=0.0).to(tl.float32)[None, :]
    sin_high = tl.load(SIN + n * R + half + r, mask=turned, other=0.0).to(tl.float32)[None, :]
    dtype = Y.dtype.element_ty
    for first in range(0, H, BH):
        h = first + tl.arange(0, BH)
        there = (h < H)[:, None] & turned[None, :]
        source = X + n * x_n + h[:, None] * x_h + r[None, :]
        target = Y + (n * H + h[:, None]) * D + r[None, :]
        low = tl.load(source, mask=there, other=0.0).to(tl.float32)
        high = tl.load(source + half, mask=there, other=0.0).to(tl.float32)
        if BACK:
            new_low = low * cos_low + high * sin_high
            new_high = high * cos_high - low * sin_low
        else:
            a = (low * cos_low).to(dtype).to(tl.float32)
            b = (-high * sin_low).to(dtype).to(tl.float32)
            new_low = a + b
            c = (high * cos_high).to(dtype).to(tl.float32)
            d = (low * sin_high).to(dtype).to(tl.float32)
            new_high = c + d
        tl.store(target, new_low.to(dtype), mask=there)
        tl.store(target + half, new_high.to(dtype), mask=there)
        if BD > 0:
            rest = tl.arange(0, BD)
            left = (h < H)[:, None] & (rest < D - R)[None, :]
            same = tl.load(X + n * x_n + h[:, None] * x_h + R + rest[None, :], mask=left, other=0.0)
            tl.store(Y + (n * H + h[:, None]) * D + R + rest[None, :], same.to(dtype), mask=left)


def turn(x: Tensor, cos: Tensor, sin: Tensor, back: bool = False) -> Tensor:
    """x [1, H, N, D], however tokens and heads lie; cos and sin [N, R], contiguous -> [1, H, N, D],
    token by token.
    """
    if x.stride(3) != 1:
        x = x.contiguous()
    _, heads, tokens, size = x.shape
    width = cos.shape[-1]
    y = torch.empty(1, tokens, heads, size, dtype=x.dtype, device=x.device)
    if y.numel():
        block = triton.next_power_of_2(max(width // 2, 1))
        _turn[(tokens,)](
            x,
            cos,
            sin,
            y,
            heads,
            size,
            width,
            x.stride(2),
            x.stride(1),
            BACK=back,
            BH=max(1, min(triton.next_power_of_2(heads), 1024 // block)),
            BR=block,
            BD=triton.next_power_of_2(size - width) if size > width else 0,
            num_warps=4,
            **early(),
        )
    return y.transpose(1, 2)
