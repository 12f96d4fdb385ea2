# mypy: disable-error-code="no-untyped-def"
"""Rotary embedding of queries and keys as one kernel, and its gradient as the same one turned back.
Twin: `models.quick_rope.rotated`.

Legend: N tokens, H heads of queries and K of keys, D numbers of a head, of which the first R are
turned.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from reinforge.models.kernels.common import early, next_power


@triton.jit
def _turn(
    Q,
    K,
    COS,
    SIN,
    NEW_Q,
    NEW_K,
    heads,
    key_heads,
    D,
    R,
    q_n,
    q_h,
    k_n,
    k_h,
    BACK: tl.constexpr,
    EARLY: tl.constexpr,
    BH: tl.constexpr,
    BK: tl.constexpr,
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
    angles = (cos_low, cos_high, sin_low, sin_high)
    _turn_heads(Q + n * q_n, q_h, NEW_Q + n * heads * D, heads, D, R, angles, BACK, BH, BR, BD)
    _turn_heads(
        K + n * k_n, k_h, NEW_K + n * key_heads * D, key_heads, D, R, angles, BACK, BK, BR, BD
    )


@triton.jit
def _turn_heads(
    X,
    x_h,
    Y,
    H,
    D,
    R,
    angles,
    BACK: tl.constexpr,
    BH: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
):
    """The H heads of a token from X, so far apart, to Y, end to end."""
    cos_low, cos_high, sin_low, sin_high = angles
    half = R // 2
    r = tl.arange(0, BR)
    dtype = Y.dtype.element_ty
    for first in range(0, H, BH):
        h = first + tl.arange(0, BH)
        there = (h < H)[:, None] & (r < half)[None, :]
        source = X + h[:, None] * x_h + r[None, :]
        target = Y + h[:, None] * D + r[None, :]
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
            same = tl.load(X + h[:, None] * x_h + R + rest[None, :], mask=left, other=0.0)
            tl.store(Y + h[:, None] * D + R + rest[None, :], same.to(dtype), mask=left)


def turn(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool = False
) -> tuple[Tensor, Tensor]:
    """q [1, H, N, D] and k [1, K, N, D], however tokens and heads lie; cos and sin [N, R],
    contiguous -> both turned, token by token.
    """
    if q.stride(3) != 1:
        q = q.contiguous()
    if k.stride(3) != 1:
        k = k.contiguous()
    _, heads, tokens, size = q.shape
    key_heads = k.shape[1]
    width = cos.shape[-1]
    new_q = torch.empty(1, tokens, heads, size, dtype=q.dtype, device=q.device)
    new_k = torch.empty(1, tokens, key_heads, size, dtype=k.dtype, device=k.device)
    if tokens:
        block = next_power(max(width // 2, 1))
        _turn[(tokens,)](
            q,
            k,
            cos,
            sin,
            new_q,
            new_k,
            heads,
            key_heads,
            size,
            width,
            q.stride(2),
            q.stride(1),
            k.stride(2),
            k.stride(1),
            BACK=back,
            BH=max(1, min(next_power(heads), 1024 // block)),
            BK=max(1, min(next_power(key_heads), 1024 // block)),
            BR=block,
            BD=next_power(size - width) if size > width else 0,
            num_warps=4,
            **early(),
        )
    return new_q.transpose(1, 2), new_k.transpose(1, 2)
