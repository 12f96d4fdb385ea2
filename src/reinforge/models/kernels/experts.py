# mypy: disable-error-code="no-untyped-def"
"""Kernels of a block of experts: which tokens go to which expert, and the products of each expert
with the tokens that it got. Twin: `models.experts` in plain torch.

Every output of a product is one chain of additions over K, from front to back, as in
`kernels.exact_product`: in tiles of one size it does not matter which tokens stand beside it.

Legend: B tokens, E experts, k chosen for a token, P = B·k pairs of a token and an expert (pair p is
choice p % k of token p // k), N outputs and K inputs of a product, r rank of an adapter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from reinforge.models.expert_adapters import LowRank
from reinforge.models.kernels.common import ceil_div, early, next_power
from reinforge.models.kernels.layer import _gated

MOST_PAIRS = 8192  # that one program lists; more are sorted by the library


# ---- who goes where ----


@triton.jit(do_not_specialize=["B"])
def _choose(
    LOGITS,
    IDS,
    WEIGHTS,
    B,
    E,
    K: tl.constexpr,
    NORMED: tl.constexpr,
    EARLY: tl.constexpr,
    BE: tl.constexpr,
    BK: tl.constexpr,
):
    """One program per token: the K largest of the softmax of its logits, the first of equal ones.
    NORMED: divided by their sum.
    """
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BE)
    k = tl.arange(0, BK)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    logits = tl.load(LOGITS + row * E + e, mask=e < E, other=float("-inf")).to(tl.float32)
    scores = tl.exp(logits - tl.max(logits, 0))
    scores = scores / tl.sum(scores, 0)
    left = tl.where(e < E, scores, -1.0)
    ids = tl.zeros([BK], tl.int32)
    best = tl.zeros([BK], tl.float32)
    for i in tl.static_range(K):
        value = tl.max(left, 0)
        at = tl.min(tl.where(left == value, e, BE), 0)
        ids = tl.where(k == i, at, ids)
        best = tl.where(k == i, value, best)
        left = tl.where(e == at, -1.0, left)
    if NORMED:
        best = best / tl.sum(best, 0)
    tl.store(IDS + row * K + k, ids.to(IDS.dtype.element_ty), mask=k < K)
    tl.store(WEIGHTS + row * K + k, best.to(WEIGHTS.dtype.element_ty), mask=k < K)


def choose(logits: Tensor, k: int, normed: bool) -> tuple[Tensor, Tensor]:
    """Experts [B, k] and their weights, in the precision of the logits [B, E]."""
    rows, experts = logits.shape
    ids = torch.empty(rows, k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(rows, k, dtype=logits.dtype, device=logits.device)
    _choose[(rows,)](
        logits.contiguous(),
        ids,
        weights,
        rows,
        experts,
        K=k,
        NORMED=normed,
        BE=next_power(experts),
        BK=next_power(k),
        num_warps=1,
        **early(),
    )
    return ids, weights


@triton.jit(do_not_specialize=["P"])
def _list(IDS, ORDER, BEGIN, P, E, EARLY: tl.constexpr, BP: tl.constexpr):
    """One program per expert, and one for the end."""
    e = tl.program_id(0)
    p = tl.arange(0, BP)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    ids = tl.load(IDS + p, mask=p < P, other=E).to(tl.int32)
    first = tl.sum((ids < e).to(tl.int32), 0)
    mine = (ids == e) & (p < P)
    place = first + tl.cumsum(mine.to(tl.int32), 0) - 1
    tl.store(ORDER + place, p, mask=mine)
    tl.store(BEGIN + e, first)


def by_expert(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Pairs [P] in the order of their experts, and where those of each expert begin, [E + 1]."""
    flat = ids.reshape(-1)
    pairs = len(flat)
    if pairs > MOST_PAIRS:
        ordered, order = torch.sort(flat, stable=True)
        every = torch.arange(experts + 1, device=ids.device)
        return order.to(torch.int32), torch.searchsorted(ordered, every).to(torch.int32)
    order = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    begin = torch.empty(experts + 1, dtype=torch.int32, device=ids.device)
    size = max(16, next_power(pairs))
    _list[(experts + 1,)](
        flat,
        order,
        begin,
        pairs,
        experts,
        BP=size,
        num_warps=max(1, min(8, size // 256)),
        **early(),
    )
    return order, begin


# ---- products ----


@triton.jit
def _weight_tile(W, n, k, s, N, K, w_n, w_k, dtype: tl.constexpr, EVEN: tl.constexpr):
    """[BK, BN] numbers s + k of outputs n, in a precision."""
    at = W + n.to(tl.int64)[None, :] * w_n + (s + k)[:, None] * w_k
    if EVEN:
        return tl.load(at, mask=(n < N)[None, :], other=0.0).to(dtype)
    else:
        return tl.load(at, mask=(n < N)[None, :] & (k < K - s)[:, None], other=0.0).to(dtype)


@triton.jit(do_not_specialize=["B"])
def _product(
    X,
    W,
    BIAS,
    WEIGHTS,
    LOW,
    UP,
    ORDER,
    BEGIN,
    Y,
    B,
    N,
    K,
    w_e,
    w_n,
    w_k,
    u_e,
    u_n,
    u_r,
    scale,
    RANK: tl.constexpr,
    TOP: tl.constexpr,
    SHARED: tl.constexpr,
    GATED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
):
    """One program per (tile of outputs, expert); it goes through the pairs of the expert, BM at a
    time. SHARED: X has a row per token, otherwise one per pair. GATED: silu of output n times
    output N + n. RANK: of an adapter, of which LOW [P, RANK] times its expert's UP and `scale` is
    added; 0: there is none. WEIGHTED: times the pair's weight, stored as [k, B, N] for who adds
    them up; otherwise as [P, N].
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    expert = tl.program_id(1)
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    weight = W + expert.to(tl.int64) * w_e
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    begin = tl.load(BEGIN + expert)
    end = tl.load(BEGIN + expert + 1)
    for first in range(begin, end, BM):
        there = first + m < end
        pair = tl.load(ORDER + first + m, mask=there, other=0)
        row = pair // TOP if SHARED else pair
        x_at = X + row.to(tl.int64)[:, None] * K + k[None, :]
        acc = tl.zeros([BM, BN], tl.float32)
        up = tl.zeros([BM, BN], tl.float32)
        for s in range(0, K, BK):
            if EVEN:
                x = tl.load(x_at + s, mask=there[:, None], other=0.0)
            else:
                x = tl.load(x_at + s, mask=there[:, None] & (k < K - s)[None, :], other=0.0)
            w = _weight_tile(weight, n, k, s, N, K, w_n, w_k, x.dtype, EVEN)
            acc = tl.dot(x, w, acc, input_precision=PRECISION)
            if GATED:
                w = _weight_tile(weight + N * w_n, n, k, s, N, K, w_n, w_k, x.dtype, EVEN)
                up = tl.dot(x, w, up, input_precision=PRECISION)
        dtype = Y.dtype.element_ty
        if RANK > 0:
            r = tl.arange(0, BR)
            low_at = LOW + pair.to(tl.int64)[:, None] * RANK + r[None, :]
            low = tl.load(low_at, mask=there[:, None] & (r < RANK)[None, :], other=0.0)
            u = UP + expert.to(tl.int64) * u_e
            w = _weight_tile(u, n, r, 0, N, RANK, u_n, u_r, low.dtype, False)
            acc += tl.dot(low, w, input_precision=PRECISION) * scale
            if GATED:
                w = _weight_tile(u + N * u_n, n, r, 0, N, RANK, u_n, u_r, low.dtype, False)
                up += tl.dot(low, w, input_precision=PRECISION) * scale
        if HAS_BIAS:
            bias = tl.load(BIAS + expert.to(tl.int64) * N + n, mask=n < N, other=0.0)
            acc = acc.to(dtype).to(tl.float32) + bias.to(tl.float32)[None, :]
        y = _gated(acc, up, dtype) if GATED else acc.to(dtype)
        to = pair.to(tl.int64)
        if WEIGHTED:
            share = tl.load(WEIGHTS + pair, mask=there, other=0.0).to(tl.float32)
            y = (y.to(tl.float32) * share[:, None]).to(dtype)
            to = (pair % TOP).to(tl.int64) * B + pair // TOP
        tl.store(Y + to[:, None] * N + n[None, :], y, mask=there[:, None] & (n < N)[None, :])


Tile = tuple[int, int, int, int, int]  # BM, BN, BK, warps, tiles on their way
# by pairs of an expert that a tile has room for, as measured on an H200: with a gate, without
TILES: dict[int, tuple[Tile, Tile]] = {
    16: ((16, 64, 128, 8, 3), (16, 64, 128, 4, 3)),
    32: ((32, 64, 128, 4, 3), (32, 64, 128, 4, 3)),
    64: ((64, 128, 64, 8, 3), (64, 128, 64, 8, 3)),
    128: ((128, 128, 64, 8, 3), (128, 128, 64, 8, 3)),
}
WIDE: Tile = (32, 32, 32, 4, 2)  # of float32
NARROW = 64  # up to so many outputs, those of an adapter's first matrix, a tile has no more
FIXED = 64  # the size of a tile in `model.exact`, whoever calls


def height(pairs: int, experts: int) -> int:
    """Room for the pairs of one expert, if tokens go about evenly to all of them: a second round
    reads the weights again.
    """
    usual = 1.5 * pairs / experts
    return next((size for size in sorted(TILES) if size >= usual), max(TILES))


def product(
    x: Tensor,
    weight: Tensor,
    order: Tensor,
    begin: Tensor,
    top: int,
    *,
    shared: bool = False,
    gated: bool = False,
    weights: Tensor | None = None,
    bias: Tensor | None = None,
    low: LowRank | None = None,
    size: int = 0,
    tile: Tile | None = None,
) -> Tensor:
    """x, [P, K] or [B, K] if `shared`, times the weight [E, N, K] (any strides) of each pair's
    expert, plus what an adapter adds to it (`low`) and its bias [E, N]. `gated`: the weight has 2N
    outputs, and y = silu(first)·second. `weights` [B, k]: y is multiplied by its pair's, and lies
    as [k, B, N]; otherwise as [P, N]. `size`: pairs of an expert that a tile has room for.
    """
    experts, outer, inner = weight.shape
    pairs = len(order)
    outer = outer // 2 if gated else outer
    x = x.contiguous()
    shape = (pairs, outer) if weights is None else (top, pairs // top, outer)
    y = torch.empty(shape, dtype=x.dtype, device=x.device)
    if not pairs:
        return y
    if tile is None:
        tile = TILES[size or height(pairs, experts)][0 if gated else 1]
        tile = WIDE if x.dtype == torch.float32 else tile
    bm, bn, bk, warps, stages = tile
    if outer <= NARROW:
        bn = min(bn, max(16, next_power(outer)))
    narrow = up = x
    if low is not None:
        narrow = product(x, low.down, order, begin, top, shared=shared, size=size)
        up = low.up
    _product[(ceil_div(outer, bn), experts)](
        x,
        weight,
        x if bias is None else bias,
        x if weights is None else weights.contiguous(),
        narrow,
        up,
        order,
        begin,
        y,
        pairs // top,
        outer,
        inner,
        weight.stride(0),
        weight.stride(1),
        weight.stride(2),
        *(up.stride() if low is not None else (0, 0, 0)),
        1.0 if low is None else low.scale,
        RANK=0 if low is None else up.shape[2],
        TOP=top,
        SHARED=shared,
        GATED=gated,
        WEIGHTED=weights is not None,
        HAS_BIAS=bias is not None,
        EVEN=inner % bk == 0,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        BM=bm,
        BN=bn,
        BK=bk,
        BR=16 if low is None else max(16, next_power(up.shape[2])),
        num_warps=warps,
        num_stages=stages,
        **early(),
    )
    return y


# ---- what the experts of a token say together ----


@triton.jit(do_not_specialize=["rows"])
def _added(X, Y, rows, E, PARTS: tl.constexpr, EARLY: tl.constexpr, BE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.zeros([BE], tl.float32)
    for part in tl.static_range(PARTS):
        at = X + (part * rows + row) * E + e
        total += tl.load(at, mask=e < E, other=0.0).to(tl.float32)
    tl.store(Y + row * E + e, total.to(Y.dtype.element_ty), mask=e < E)


def added(parts: Tensor) -> Tensor:
    """[B, N] of parts [k, B, N], one after the other and in float32."""
    count, rows, size = parts.shape
    y = torch.empty(rows, size, dtype=parts.dtype, device=parts.device)
    if rows:
        _added[(rows, ceil_div(size, 1024))](
            parts, y, rows, size, PARTS=count, BE=1024, num_warps=4, **early()
        )
    return y
