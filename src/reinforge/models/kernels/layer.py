# mypy: disable-error-code="no-untyped-def"
"""Kernels of a decoder layer for one new token per sequence: norms, the gate, products of few rows.
Twins: the functions of the same names in `models.fused_decode`.

Legend: B sequences, H query heads, D head size, E hidden size, N outputs and K inputs of a product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from reinforge.models.fp8 import Fp8Rows
from reinforge.models.kernels.common import (
    MULTIPROCESSORS,
    ceil_div,
    early,
    next_power,
    rounded_silu,
)
from reinforge.models.kernels.fp8 import quantised

# ---- between the matrix products ----


@triton.jit
def _add_norm(
    X,
    DELTA,
    WEIGHT,
    Y,
    Q,
    SCALE,
    E,
    rows,
    eps,
    PARTS: tl.constexpr,
    QUANTISE: tl.constexpr,
    EARLY: tl.constexpr,
    BE: tl.constexpr,
):
    """One program per row: X += the sum of the parts of DELTA, Y = RMS norm of X. Rounded where
    transformers rounds: the sum, the normed number, its product with the weight. QUANTISE: Q and
    SCALE are Y in FP8.
    """
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BE)
    there = e < E
    weight = tl.load(WEIGHT + e, mask=there, other=0.0)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(X + row * E + e, mask=there, other=0.0)
    if PARTS > 0:
        delta = tl.zeros([BE], tl.float32)
        for part in tl.static_range(PARTS):
            at = DELTA + (part * rows + row) * E + e
            delta += tl.load(at, mask=there, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) + delta.to(x.dtype).to(tl.float32)).to(x.dtype)
        tl.store(X + row * E + e, x, mask=there)
    wide = x.to(tl.float32)
    mean = tl.sum(wide * wide, 0) / E
    normed = (wide * tl.rsqrt(mean + eps)).to(x.dtype)
    y = (weight.to(tl.float32) * normed.to(tl.float32)).to(x.dtype)
    tl.store(Y + row * E + e, y, mask=there)
    if QUANTISE:
        q, scale = quantised(tl.where(there, y.to(tl.float32), 0.0))
        tl.store(Q + row * E + e, q, mask=there)
        tl.store(SCALE + row, scale)


def add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, into: Fp8Rows | None = None
) -> Tensor:
    """x [B, E] += delta ([B, E], or [parts, B, E] whose parts are summed), in place; the RMS norm
    of the sum. `into`: is set to that norm in FP8 as well.
    """
    rows, size = x.shape
    y = torch.empty_like(x)
    parts = 0 if delta is None else 1 if delta.ndim == 2 else delta.shape[0]
    _add_norm[(rows,)](
        x,
        x if delta is None else delta,
        weight,
        y,
        y if into is None else into.values,
        y if into is None else into.scale,
        size,
        rows,
        eps,
        PARTS=parts,
        QUANTISE=into is not None,
        BE=next_power(size),
        num_warps=8 if size > 2048 else 4,
        **early(),
    )
    return y


@triton.jit
def _head_norm(X, WEIGHT, heads, x_b, x_h, eps, D: tl.constexpr, BD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    at = X + (row // heads) * x_b + (row % heads) * x_h + d
    x = tl.load(at, mask=d < D, other=0.0)
    wide = x.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)).to(x.dtype)
    weight = tl.load(WEIGHT + d, mask=d < D, other=0.0)
    tl.store(at, (weight.to(tl.float32) * normed.to(tl.float32)).to(x.dtype), mask=d < D)


def head_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The RMS norm of every head of x [B, H, D], in place."""
    rows, heads, size = x.shape
    _head_norm[(rows * heads,)](
        x,
        weight,
        heads,
        x.stride(0),
        x.stride(1),
        eps,
        D=size,
        BD=next_power(size),
        num_warps=1,
    )
    return x


@triton.jit
def _gated(gate, up, DTYPE: tl.constexpr):
    """silu(gate)·up of float32 numbers, rounded where transformers rounds."""
    silu = rounded_silu(gate, DTYPE).to(tl.float32)
    return (silu * up.to(DTYPE).to(tl.float32)).to(DTYPE)


@triton.jit
def _silu(X, Y, N, EARLY: tl.constexpr, BN: tl.constexpr):
    n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(X + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(Y + n, rounded_silu(x, Y.dtype.element_ty), mask=n < N)


def silu(x: Tensor) -> Tensor:
    """Every number of x, with the bits that `silu_mul` gives it."""
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        _silu[(ceil_div(x.numel(), 1024),)](x, y, x.numel(), BN=1024, num_warps=4, **early())
    return y


@triton.jit
def _silu_mul(X, Y, N, EARLY: tl.constexpr, BN: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    gate = tl.load(X + row * 2 * N + n, mask=n < N, other=0.0).to(tl.float32)
    up = tl.load(X + row * 2 * N + N + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(Y + row * N + n, _gated(gate, up, Y.dtype.element_ty), mask=n < N)


def silu_mul(x: Tensor) -> Tensor:
    """silu(x[:, :N])·x[:, N:] of x [B, 2N]."""
    rows, size = x.shape[0], x.shape[1] // 2
    y = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    _silu_mul[(rows, ceil_div(size, 1024))](x, y, size, BN=1024, num_warps=4, **early())
    return y


# ---- matrix products of few rows: the weights are read once, at the speed of the memory ----


@triton.jit(do_not_specialize=["M"])
def _few_rows(
    X,
    W,
    BIAS,
    SX,
    SW,
    Y,
    M,
    N,
    K,
    x_m,
    PER,
    SCALED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    IMPRECISE: tl.constexpr,
    EARLY: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """One program per (tile of outputs, part of K); the tile of weights is the left factor, so that
    few rows fill a narrow tile. Y is [M, N], or [parts, M, N] for who adds them up.
    SCALED: both factors are FP8 with a scale for every row; IMPRECISE products of them are summed
    up before the sum goes into a float32, for a tensor core keeps fewer bits.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    part = tl.program_id(1)
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    begin = part * PER
    end = tl.minimum(K, begin + PER)
    w_at = W + n.to(tl.int64)[:, None] * K + begin + k[None, :]
    x_at = X + m[None, :] * x_m + begin + k[:, None]
    acc = tl.zeros([BN, BM], tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for s in range(begin, end, BK):
        if EVEN:
            w_there = (n < N)[:, None]
            x_there = (m < M)[None, :]
        else:
            w_there = (n < N)[:, None] & (k < end - s)[None, :]
            x_there = (m < M)[None, :] & (k < end - s)[:, None]
        w = tl.load(w_at, mask=w_there, other=0.0)
        x = tl.load(x_at, mask=x_there, other=0.0)
        acc = tl.dot(w, x, acc, input_precision=PRECISION, max_num_imprecise_acc=IMPRECISE)
        w_at += BK
        x_at += BK
    if SCALED:
        sx = tl.load(SX + m, mask=m < M, other=0.0)[None, :]
        acc *= tl.load(SW + n, mask=n < N, other=0.0)[:, None] * sx
    if HAS_BIAS:
        acc += tl.load(BIAS + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    there = (n < N)[:, None] & (m < M)[None, :]
    y_at = Y + (part.to(tl.int64) * M + m)[None, :] * N + n[:, None]
    tl.store(y_at, acc.to(Y.dtype.element_ty), mask=there)


# up to so many rows, these products are faster than the library's, as measured on an H200: of any
# kind, with a gate, in parts
FEW_ROWS = 16
GATED_ROWS = 64
PART_ROWS = 64
FP8_ROWS = 64  # in FP8, of any kind and with a gate
FP8_PART_ROWS = 128
IMPRECISE = 128  # see `_few_rows`


def product_tile(rows: int, size: int) -> tuple[int, int, int, int]:
    """Outputs and inputs of a tile of weights, warps, and how many tiles are on their way, as
    measured on an H200. `size`: bytes of a weight.
    """
    if size == 4:
        return 32, 64, 4, 3
    if size == 1:
        return 64, 128, 4, 8 if rows <= 64 else 6
    return 64, 128, 4, 6 if rows <= 32 else 4


def few_rows(
    x: Tensor | Fp8Rows,
    weight: Tensor | Fp8Rows,
    bias: Tensor | None = None,
    *,
    parts: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """x [B, K] times weight [N, K] transposed, plus bias, in `dtype` or that of x; both are FP8 or
    none. `parts`: [parts, B, N] in float32, whose sum is the product.
    """
    left, right, scales = _factors(x, weight)
    rows, inner = left.shape
    outer = right.shape[0]
    bn, bk, warps, stages = product_tile(rows, left.element_size())
    tiles = ceil_div(outer, bn)
    count = 1
    if parts:
        while tiles * count < 0.75 * MULTIPROCESSORS and count < 8:
            count *= 2
    per = ceil_div(ceil_div(inner, bk), count) * bk
    count = ceil_div(inner, per)
    shape = (count, rows, outer) if parts else (rows, outer)
    made = torch.float32 if parts else dtype or left.dtype
    y = torch.empty(shape, dtype=made, device=left.device)
    _few_rows[(tiles, count)](
        left,
        right,
        right if bias is None else bias,
        *scales,
        y,
        rows,
        outer,
        inner,
        left.stride(0),
        per,
        HAS_BIAS=bias is not None,
        EVEN=inner % bk == 0,
        BM=max(16, next_power(rows)),
        BN=bn,
        BK=bk,
        num_warps=warps,
        num_stages=stages,
        **_arithmetic(left),
        **early(),
    )
    return y


def _factors(
    x: Tensor | Fp8Rows, weight: Tensor | Fp8Rows
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """The numbers of both, and their scales, which are anything where there are none."""
    left, right = (one.values if isinstance(one, Fp8Rows) else one for one in (x, weight))
    scales = tuple(one.scale if isinstance(one, Fp8Rows) else one for one in (x, weight))
    assert right.is_contiguous() and left.stride(1) == 1
    return left, right, (scales[0], scales[1])


def _arithmetic(x: Tensor) -> dict[str, bool | str | int]:
    """How numbers of this kind are multiplied."""
    scaled = x.element_size() == 1
    return {
        "SCALED": scaled,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "IMPRECISE": IMPRECISE if scaled else 0,
    }


# ---- a product with a gate ----


@triton.jit
def _weights(W, n, there, k, s, K, EVEN: tl.constexpr):
    """[BK, ..] numbers s + k of the rows n of the weights."""
    at = W + n.to(tl.int64)[None, :] * K + s + k[:, None]
    if EVEN:
        return tl.load(at, mask=there[None, :], other=0.0)
    else:
        return tl.load(at, mask=there[None, :] & (k < K - s)[:, None], other=0.0)


@triton.jit
def _store_gated(Y, gate, up, SX, SW, m, n, there, M, N, SCALED: tl.constexpr):
    """silu(gate)·up of outputs n."""
    if SCALED:
        sx = tl.load(SX + m, mask=m < M, other=0.0)[:, None]
        gate *= tl.load(SW + n, mask=there, other=0.0)[None, :] * sx
        up *= tl.load(SW + N + n, mask=there, other=0.0)[None, :] * sx
    at = Y + m.to(tl.int64)[:, None] * N + n[None, :]
    real = (m < M)[:, None] & there[None, :]
    tl.store(at, _gated(gate, up, Y.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["M"])
def _gated_rows(
    X,
    W,
    SX,
    SW,
    Y,
    M,
    N,
    K,
    x_m,
    SCALED: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    IMPRECISE: tl.constexpr,
    EARLY: tl.constexpr,
    BM: tl.constexpr,
    B1: tl.constexpr,
    B2: tl.constexpr,
    BK: tl.constexpr,
):
    """One program per slice of B1 + B2 outputs: silu of the product with rows n of the weights,
    times the product with rows N + n. Two sizes, so that a slice need not be a power of two.
    SCALED, IMPRECISE: see `_few_rows`.
    """
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    n1 = tl.program_id(0) * (B1 + B2) + tl.arange(0, B1)
    gate1 = tl.zeros([BM, B1], tl.float32)
    up1 = tl.zeros([BM, B1], tl.float32)
    if B2 > 0:
        n2 = tl.program_id(0) * (B1 + B2) + B1 + tl.arange(0, B2)
        gate2 = tl.zeros([BM, B2], tl.float32)
        up2 = tl.zeros([BM, B2], tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for s in range(0, K, BK):
        x_at = X + m[:, None] * x_m + s + k[None, :]
        if EVEN:
            x = tl.load(x_at, mask=(m < M)[:, None], other=0.0)
        else:
            x = tl.load(x_at, mask=(m < M)[:, None] & (k < K - s)[None, :], other=0.0)
        w = _weights(W, n1, n1 < N, k, s, K, EVEN)
        gate1 = tl.dot(x, w, gate1, input_precision=PRECISION, max_num_imprecise_acc=IMPRECISE)
        w = _weights(W, N + n1, n1 < N, k, s, K, EVEN)
        up1 = tl.dot(x, w, up1, input_precision=PRECISION, max_num_imprecise_acc=IMPRECISE)
        if B2 > 0:
            w = _weights(W, n2, n2 < N, k, s, K, EVEN)
            gate2 = tl.dot(x, w, gate2, input_precision=PRECISION, max_num_imprecise_acc=IMPRECISE)
            w = _weights(W, N + n2, n2 < N, k, s, K, EVEN)
            up2 = tl.dot(x, w, up2, input_precision=PRECISION, max_num_imprecise_acc=IMPRECISE)
    _store_gated(Y, gate1, up1, SX, SW, m, n1, n1 < N, M, N, SCALED)
    if B2 > 0:
        _store_gated(Y, gate2, up2, SX, SW, m, n2, n2 < N, M, N, SCALED)


Slice = tuple[int, int, int, int, int, int]
# by bytes of a weight and rows: outputs of both tiles of a slice, inputs, warps, tiles on their
# way, and how many such programs a multiprocessor has room for, as measured on an H200
SLICES: dict[tuple[int, int], tuple[Slice, ...]] = {
    (2, 32): ((32, 0, 128, 4, 3, 4), (32, 16, 128, 4, 3, 3), (64, 0, 128, 4, 3, 2)),
    (2, 64): ((64, 0, 64, 4, 3, 2), (64, 16, 64, 4, 3, 2), (64, 32, 64, 4, 3, 2)),
    (1, 16): ((32, 0, 128, 4, 3, 4),),
    (1, 32): ((64, 0, 128, 4, 3, 2),),
    (1, 64): ((32, 0, 128, 4, 4, 4), (32, 16, 128, 4, 4, 3), (64, 0, 128, 4, 4, 2)),
    (4, 32): ((32, 0, 32, 4, 3, 2), (32, 16, 32, 4, 3, 2)),
    (4, 64): ((32, 0, 32, 4, 3, 2),),
}


def slice_of(rows: int, outer: int, size: int) -> Slice:
    """The slice whose programs leave the fewest places empty: all begin at once, and what does not
    fit has to wait for the others. `size`: bytes of a weight.
    """
    some = next(SLICES[key] for key in sorted(SLICES) if key[0] == size and rows <= key[1])

    def full(one: Slice) -> float:
        programs = ceil_div(outer, one[0] + one[1])
        places = MULTIPROCESSORS * one[5]
        return programs / (ceil_div(programs, places) * places)

    return max(some, key=full)


def gated_rows(
    x: Tensor | Fp8Rows, weight: Tensor | Fp8Rows, dtype: torch.dtype | None = None
) -> Tensor:
    """silu(first half)·(second half) of x [B, K] times weight [2N, K] transposed, in `dtype` or
    that of x; both are FP8 or none.
    """
    left, right, scales = _factors(x, weight)
    rows, inner = left.shape
    outer = right.shape[0] // 2
    first, second, bk, warps, stages, _ = slice_of(rows, outer, left.element_size())
    y = torch.empty(rows, outer, dtype=dtype or left.dtype, device=left.device)
    _gated_rows[(ceil_div(outer, first + second),)](
        left,
        right,
        *scales,
        y,
        rows,
        outer,
        inner,
        left.stride(0),
        EVEN=inner % bk == 0,
        BM=max(16, next_power(rows)),
        B1=first,
        B2=second,
        BK=bk,
        num_warps=warps,
        num_stages=stages,
        **_arithmetic(left),
        **early(),
    )
    return y
