# mypy: disable-error-code="no-untyped-def"
"""Kernels of what LoRA adapters add to the linear layers of a family, which read the same input
(q, k, v; gate, up), for one new token per sequence: two for all of them. Twin:
`decode_ops.add_low_rank`.

The matrices of an adapter are rounded to the precision of the input as they are read, and so is the
narrow product between them, as in training (`models.adapters`).

Legend: B rows, K inputs, N outputs and R rank of an adapter, S parts of K.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from reinforge.models.kernels.common import MULTIPROCESSORS, ceil_div, early, next_power
from reinforge.models.kernels.layer import _gated, _weights, silu_mul
from reinforge.models.projections import Adapter

MOST = 3  # adapters of a family
RANKS = 64  # that a tile has room for; larger ranks take several
WIDE_RANKS = 32  # that a tile of `gated_expand` has room for in float32
SUMMANDS = tl.constexpr(4096)  # of a narrow product, which are read at once


def add(y: Tensor, x: Tensor, adapters: Sequence[Adapter]) -> None:
    """y [B, outputs of the family] += what the adapters add for x [B, K], in place."""
    expand(y, shrink(x, adapters), adapters, x.dtype)


def gated(y: Tensor, x: Tensor, adapters: Sequence[Adapter]) -> Tensor:
    """silu(y[:, :N])·y[:, N:] of y [B, 2N] with what the adapters add to it for x [B, K]."""
    if y.dtype == torch.float32 and ranks_of(adapters) > WIDE_RANKS:
        y = y.clone()
        add(y, x, adapters)
        return silu_mul(y)
    return gated_expand(y, shrink(x, adapters), adapters)


# ---- the narrow product ----


@triton.jit
def _pick(i, first, second, third):
    """What belongs to adapter i."""
    return tl.where(i == 0, first, tl.where(i == 1, second, third))


@triton.jit(do_not_specialize=["M"])
def _shrink(
    X,
    DOWN1,
    DOWN2,
    DOWN3,
    T,
    M,
    K,
    x_m,
    PER,
    R1: tl.constexpr,
    R2: tl.constexpr,
    R3: tl.constexpr,
    EVEN: tl.constexpr,
    EARLY: tl.constexpr,
    BM: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
):
    """One program per (tile of rows, tile of the ranks of an adapter, part of K): a part of T. A
    rank of 0: there is no such adapter.
    """
    second: tl.constexpr = (R1 + BR - 1) // BR
    third: tl.constexpr = second + (R2 + BR - 1) // BR
    total: tl.constexpr = R1 + R2 + R3
    precision: tl.constexpr = "ieee" if X.dtype.element_ty == tl.float32 else "tf32"
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    tile = tl.program_id(1)
    part = tl.program_id(2)
    adapter = (tile >= second).to(tl.int32) + (tile >= third).to(tl.int32)
    down_of = _pick(adapter, DOWN1, DOWN2, DOWN3)
    rank = _pick(adapter, R1, R2, R3)
    r = (tile - _pick(adapter, 0, second, third)) * BR + tl.arange(0, BR)
    k = tl.arange(0, BK)
    x_at = X + m.to(tl.int64)[:, None] * x_m + k[None, :]
    acc = tl.zeros([BM, BR], tl.float32)
    begin = part * PER
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for s in range(begin, tl.minimum(K, begin + PER), BK):
        if EVEN:
            x = tl.load(x_at + s, mask=(m < M)[:, None], other=0.0)
        else:
            x = tl.load(x_at + s, mask=(m < M)[:, None] & (k < K - s)[None, :], other=0.0)
        down = _weights(down_of, r, r < rank, k, s, K, EVEN).to(x.dtype)
        acc = tl.dot(x, down, acc, input_precision=precision)
    column = _pick(adapter, 0, R1, R1 + R2) + r
    at = T + (part * M + m).to(tl.int64)[:, None] * total + column[None, :]
    tl.store(at, acc, mask=(m < M)[:, None] & (r < rank)[None, :])


def narrow_tile(rows: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Rows and inputs of a tile of `shrink`, warps, and how many tiles are on their way: an adapter
    is read once for every tile of rows. Products in float32 are not of tensor cores, and have no
    room for many.
    """
    if rows <= 16:
        bm = 16
    else:
        bm = 32 if rows <= 256 or dtype == torch.float32 else 64
    return bm, 32 if dtype == torch.float32 else 128, 4, 4 if bm <= 32 else 3


def part_of(tiles: int, bm: int, inner: int, bk: int) -> int:
    """How much of K a program of `shrink` goes through, where it has so many tiles of BM rows and
    of ranks: most multiprocessors have something to do, as far as K goes round. Whoever reads the
    parts adds them up, so that tall tiles have fewer.
    """
    count = 1
    while tiles * count < 0.7 * MULTIPROCESSORS and count < 1024 // bm:
        count *= 2
    return ceil_div(ceil_div(inner, bk), count) * bk


def ranks_of(adapters: Sequence[Adapter]) -> int:
    """Ranks of a tile, in both products."""
    return min(RANKS, max(16, next_power(max(adapter.rank for adapter in adapters))))


def shrink(x: Tensor, adapters: Sequence[Adapter]) -> Tensor:
    """x [B, K] times the first matrices of the adapters transposed, side by side: parts [S, B, R of
    all] in float32, whose sum is the product.
    """
    assert len(adapters) <= MOST and x.stride(1) == 1
    rows, inner = x.shape
    ranks = [adapter.rank for adapter in adapters]
    br = ranks_of(adapters)
    bm, bk, warps, stages = narrow_tile(rows, x.dtype)
    tiles = ceil_div(rows, bm), sum(ceil_div(rank, br) for rank in ranks)
    per = part_of(tiles[0] * tiles[1], bm, inner, bk)
    count = ceil_div(inner, per)
    narrow = torch.empty(count, rows, sum(ranks), dtype=torch.float32, device=x.device)
    _shrink[(*tiles, count)](
        x,
        *_padded([adapter.down.contiguous() for adapter in adapters]),
        narrow,
        rows,
        inner,
        x.stride(0),
        per,
        *_padded(ranks, 0),
        EVEN=inner % bk == 0,
        BM=bm,
        BR=br,
        BK=bk,
        num_warps=warps,
        num_stages=stages,
        **early(),
    )
    return narrow


def _padded(some: list[Any], other: Any = None) -> list[Any]:
    """For a kernel that takes `MOST`; by the first of them, where the kind alone matters."""
    return some + [some[0] if other is None else other] * (MOST - len(some))


# ---- the wide product ----


@triton.jit
def _narrow(
    T,
    m,
    first,
    M,
    rank,
    parts,
    DTYPE: tl.constexpr,
    TOTAL: tl.constexpr,
    PARTS: tl.constexpr,
    BR: tl.constexpr,
):
    """[BM, BR]: the sum of the parts of T, of ranks `first` and after. PARTS: as many at most."""
    r = first + tl.arange(0, BR)
    # a reduction, for the compiler moves plain sums behind the change of layout that a product
    # needs, which then happens to every part, one after the other
    some: tl.constexpr = max(1, min(PARTS, SUMMANDS // (m.shape[0] * BR)))
    p = tl.arange(0, some)
    row = p[:, None, None].to(tl.int64) * M + m[None, :, None]
    at = T + row * TOTAL + r[None, None, :]
    there = (m < M)[None, :, None] & (r < rank)[None, None, :]
    summands = tl.zeros([some, m.shape[0], BR], tl.float32)
    for begin in tl.static_range(0, PARTS, some):
        real = there & (begin + p < parts)[:, None, None]
        summands += tl.load(at + (begin * M).to(tl.int64) * TOTAL, mask=real, other=0.0)
    return tl.sum(summands, 0).to(DTYPE)


@triton.jit
def _up(UP, n, there, first, rank, BR: tl.constexpr):
    """[BR, BN], not yet rounded: ranks `first` and after of outputs n."""
    r = first + tl.arange(0, BR)
    at = UP + n[None, :] * rank + r[:, None]
    return tl.load(at, mask=(r < rank)[:, None] & there[None, :], other=0.0)


@triton.jit
def _widened(
    narrow,
    up,
    T,
    UP,
    m,
    n,
    there,
    M,
    rank,
    parts,
    RANK: tl.constexpr,
    TOTAL: tl.constexpr,
    PARTS: tl.constexpr,
    BR: tl.constexpr,
):
    """[BM, BN] in float32: the narrow product times UP transposed, of which `narrow` and `up` are
    the first ranks. RANK: as many at most.
    """
    dtype: tl.constexpr = narrow.dtype
    precision: tl.constexpr = "ieee" if tl.float32 == dtype else "tf32"
    acc = tl.dot(narrow, up.to(dtype), input_precision=precision)
    for first in tl.static_range(BR, RANK, BR):
        more = _narrow(T, m, first, M, rank, parts, dtype, TOTAL, PARTS, BR)
        up = _up(UP, n, there, first, rank, BR).to(dtype)
        acc = tl.dot(more, up, acc, input_precision=precision)
    return acc


@triton.jit(do_not_specialize=["M", "parts"])
def _expand(
    Y,
    T,
    UP1,
    UP2,
    UP3,
    scale1,
    scale2,
    scale3,
    begin1,
    begin2,
    begin3,
    N1,
    N2,
    N3,
    M,
    y_m,
    parts,
    DTYPE: tl.constexpr,
    R1: tl.constexpr,
    R2: tl.constexpr,
    R3: tl.constexpr,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
):
    """One program per (tile of the outputs of an adapter, tile of rows): Y += scale·T·UP. A rank of
    0: there is no such adapter.
    """
    total: tl.constexpr = R1 + R2 + R3
    tile = tl.program_id(0)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    second = tl.cdiv(N1, BN)
    third = second + tl.cdiv(N2, BN)
    adapter = (tile >= second).to(tl.int32) + (tile >= third).to(tl.int32)
    size = _pick(adapter, N1, N2, N3)
    rank = _pick(adapter, R1, R2, R3)
    n = (tile - _pick(adapter, 0, second, third)) * BN + tl.arange(0, BN)
    t = T + _pick(adapter, 0, R1, R1 + R2)
    up_of = _pick(adapter, UP1, UP2, UP3)
    up = _up(up_of, n, n < size, 0, rank, BR)
    if EARLY:  # for the kernel before, which does not write UP
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    begin = _pick(adapter, begin1, begin2, begin3)
    at = Y + m.to(tl.int64)[:, None] * y_m + (begin + n)[None, :]
    there = (m < M)[:, None] & (n < size)[None, :]
    y = tl.load(at, mask=there, other=0.0)
    narrow = _narrow(t, m, 0, M, rank, parts, DTYPE, total, PARTS, BR)
    more = _widened(narrow, up, t, up_of, m, n, n < size, M, rank, parts, RANK, total, PARTS, BR)
    more *= _pick(adapter, scale1, scale2, scale3)
    tl.store(at, (y.to(tl.float32) + more).to(y.dtype), mask=there)


TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def wide_tile(rows: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Rows and outputs of a tile of `expand`, and warps, as measured on an H200."""
    if dtype == torch.float32 or rows <= 16:
        return 16 if rows <= 16 else 32, 64, 4
    if rows <= 64:
        return 32, 128, 4
    return (16, 128, 4) if rows <= 256 else (64, 128, 8)


def expand(y: Tensor, narrow: Tensor, adapters: Sequence[Adapter], dtype: torch.dtype) -> None:
    """y [B, outputs of the family] += the sum of the parts of narrow [S, B, R of all], rounded to
    `dtype`, times the second matrices of the adapters transposed and their scales, in place.
    Rows of y may lie apart, and may have more precision.
    """
    assert y.stride(1) == 1
    parts, rows, _ = narrow.shape
    bm, bn, warps = wide_tile(rows, dtype)
    ranks = [adapter.rank for adapter in adapters]
    sizes = [len(adapter.up) for adapter in adapters]
    _expand[(sum(ceil_div(size, bn) for size in sizes), ceil_div(rows, bm))](
        y,
        narrow,
        *_padded([adapter.up.contiguous() for adapter in adapters]),
        *_padded([adapter.scale for adapter in adapters], 0.0),
        *_padded([adapter.first for adapter in adapters], 0),
        *_padded(sizes, 0),
        rows,
        y.stride(0),
        parts,
        TYPES[dtype],
        *_padded(ranks, 0),
        RANK=max(ranks),
        PARTS=next_power(parts),
        BM=bm,
        BN=bn,
        BR=ranks_of(adapters),
        num_warps=warps,
        **early(),
    )


# ---- the wide product, and a gate ----


@triton.jit(do_not_specialize=["M", "parts"])
def _gated_expand(
    Y,
    T,
    UP1,
    UP2,
    OUT,
    scale1,
    scale2,
    M,
    N,
    y_m,
    parts,
    R1: tl.constexpr,
    R2: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
):
    """Program i of (some, tiles of rows) goes through tiles i, i + some, .. of the outputs: silu of
    column n of Y times column N + n, each with what its adapter adds. What a tile reads is on its
    way while the one before is computed. A rank of 0: it has none.
    """
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    tile = tl.program_id(0)
    n = tile * BN + tl.arange(0, BN)
    dtype: tl.constexpr = Y.dtype.element_ty
    total: tl.constexpr = R1 + R2
    if R1 > 0:
        gate_up = _up(UP1, n, n < N, 0, R1, BR)
    if R2 > 0:
        up_up = _up(UP2, n, n < N, 0, R2, BR)
    if EARLY:  # for the kernel before, which does not write UP1 and UP2
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    rows = Y + m.to(tl.int64)[:, None] * y_m
    to = OUT + m.to(tl.int64)[:, None] * N
    real = (m < M)[:, None]
    gate_y = tl.load(rows + n[None, :], mask=real & (n < N)[None, :], other=0.0)
    up_y = tl.load(rows + N + n[None, :], mask=real & (n < N)[None, :], other=0.0)
    if R1 > 0:
        gate_t = _narrow(T, m, 0, M, R1, parts, dtype, total, PARTS, BR)
    if R2 > 0:
        up_t = _narrow(T + R1, m, 0, M, R2, parts, dtype, total, PARTS, BR)
    for _ in range(tile, tl.cdiv(N, BN), tl.num_programs(0)):
        there = n < N
        next = n + tl.num_programs(0) * BN
        gate = gate_y.to(tl.float32)
        up = up_y.to(tl.float32)
        gate_y = tl.load(rows + next[None, :], mask=real & (next < N)[None, :], other=0.0)
        up_y = tl.load(rows + N + next[None, :], mask=real & (next < N)[None, :], other=0.0)
        if R1 > 0:
            now = gate_up
            gate_up = _up(UP1, next, next < N, 0, R1, BR)
            gate += scale1 * _widened(
                gate_t, now, T, UP1, m, n, there, M, R1, parts, R1, total, PARTS, BR
            )
        if R2 > 0:
            now = up_up
            up_up = _up(UP2, next, next < N, 0, R2, BR)
            up += scale2 * _widened(
                up_t, now, T + R1, UP2, m, n, there, M, R2, parts, R2, total, PARTS, BR
            )
        tl.store(to + n[None, :], _gated(gate, up, dtype), mask=real & there[None, :])
        n = next


def gated_tile(rows: int, ranks: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Rows and outputs of a tile of `gated_expand`, warps, and programs of a multiprocessor, each
    of which adds up the parts of its rows once. As measured on an H200 with ranks of 16.
    """
    bm = 16 if rows <= 16 else 32
    if dtype == torch.float32:
        return (bm, 32, 4, 4) if ranks <= 16 else (bm, 32, 8, 2)
    if ranks > 16:
        return (bm, 64, 4, 4) if rows <= 16 else (bm, 64, 8, 2)
    if rows <= 16:
        return bm, 128, 4, 1
    return (bm, 64, 4, 4) if rows <= 128 else (64, 64, 8, 2)


def gated_expand(y: Tensor, narrow: Tensor, adapters: Sequence[Adapter]) -> Tensor:
    """`expand` of y [B, 2N], which is left as it is, then silu(first half)·(second half)."""
    assert y.stride(1) == 1
    parts, rows, _ = narrow.shape
    size = y.shape[1] // 2
    out = torch.empty(rows, size, dtype=y.dtype, device=y.device)
    by_half = {adapter.first // size: adapter for adapter in adapters}
    halves = [by_half.get(half) for half in range(2)]
    ranks = [0 if half is None else half.rank for half in halves]
    br = ranks_of(adapters)
    bm, bn, warps, places = gated_tile(rows, br, y.dtype)
    tiles = ceil_div(rows, bm)
    some = min(ceil_div(size, bn), ceil_div(MULTIPROCESSORS * places, tiles))
    _gated_expand[(some, tiles)](
        y,
        narrow,
        *(narrow if half is None else half.up.contiguous() for half in halves),
        out,
        *(0.0 if half is None else half.scale for half in halves),
        rows,
        size,
        y.stride(0),
        parts,
        *ranks,
        PARTS=next_power(parts),
        BM=bm,
        BN=bn,
        BR=br,
        num_warps=warps,
        **early(),
    )
    return out
