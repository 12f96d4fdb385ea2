# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of `model.exact`.

What a program computes for a row depends on that row and on constants of the model alone: the
shapes of tiles, the number of warps and the order of every sum are the same for one row and for a
million.

Legend: M rows, N outputs, K inputs (of a matrix product) or key/value heads (of attention), G query
heads per key head, D head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from reinforge.models import exact_tiles

# one tile of a matrix product: two warp groups, each a chain of m64n128k16 products over K
BM = 128
BN = 128
BK = 64
GROUP = 8  # row tiles that share a column tile's weights in the cache


@triton.jit(do_not_specialize=["M"])
def _matmul(
    X,
    W,
    B,
    Y,
    M,
    N,
    K,
    x_m,
    w_n,
    w_k,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Y [M, N] = X [M, K]·Wᵀ + B.

    One program per output tile, K from front to back in one float32 accumulator, never split.
    """
    pid = tl.program_id(0)
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    first = pid // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    m = (first + pid % (GROUP * tiles_n) % height) * BM + tl.arange(0, BM)
    n = pid % (GROUP * tiles_n) // height * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    x_at = X + m.to(tl.int64)[:, None] * x_m + k[None, :]
    w_at = W + n.to(tl.int64)[None, :] * w_n + k[:, None] * w_k
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        if EVEN:
            x = tl.load(x_at, mask=(m < M)[:, None], other=0.0)
            w = tl.load(w_at, mask=(n < N)[None, :], other=0.0)
        else:
            x = tl.load(x_at, mask=(m < M)[:, None] & (k < K - start)[None, :], other=0.0)
            w = tl.load(w_at, mask=(n < N)[None, :] & (k < K - start)[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
        x_at += BK
        w_at += BK * w_k
    if BIAS:
        acc += tl.load(B + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(
        Y + m.to(tl.int64)[:, None] * N + n[None, :],
        acc.to(Y.dtype.element_ty),
        mask=(m < M)[:, None] & (n < N)[None, :],
    )


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [M, K] times weight [N, K] (any strides) transposed, plus bias [N]."""
    x = x.contiguous()
    (rows, inner), outer = x.shape, weight.shape[0]
    y = torch.empty(rows, outer, dtype=x.dtype, device=x.device)
    if not rows:
        return y
    wide = x.dtype == torch.float32
    bm, bn, bk = (64, 64, 32) if wide else (BM, BN, BK)
    _matmul[(triton.cdiv(rows, bm) * triton.cdiv(outer, bn),)](
        x,
        weight,
        y if bias is None else bias,
        y,
        rows,
        outer,
        inner,
        inner,
        weight.stride(0),
        weight.stride(1),
        BIAS=bias is not None,
        EVEN=inner % bk == 0,
        BM=bm,
        BN=bn,
        BK=bk,
        GROUP=GROUP,
        PRECISION="ieee" if wide else "tf32",
        num_warps=4 if wide else 8,
        num_stages=2 if wide else 4,
    )
    return y


@triton.jit
def _row_sum(X, Y, E, x_m, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, E, BLOCK):
        total += tl.load(X + row * x_m + start + e, mask=start + e < E, other=0.0).to(tl.float32)
    tl.store(Y + row, tl.sum(total, 0))


def row_sum(x: Tensor) -> Tensor:
    """[R] float32 sums of x [R, E]."""
    x = x.contiguous()
    y = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    if len(y):
        block = min(4096, triton.next_power_of_2(x.shape[1]))
        _row_sum[(x.shape[0],)](
            x,
            y,
            x.shape[1],
            x.shape[1],
            BLOCK=block,
            num_warps=8 if block > 1024 else 4 if block > 256 else 1,
        )
    return y


@triton.jit(do_not_specialize=["P", "window"])
def _attend(
    Q,
    K,
    V,
    O,
    TABLES,
    FIRST,
    BASE,
    LOW,
    HIGH,
    KEYS,
    scale,
    softcap,
    window,
    P,
    q_n,
    q_h,
    k_n,
    k_h,
    v_n,
    v_h,
    W,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per (tile of queries, key head).

    PAGED changes where keys are looked up, nothing else: see `exact_tiles.TilePlan`.
    """
    tile = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    first = tl.load(FIRST + tile)
    high = tl.load(HIGH + tile)
    r = tl.arange(0, BM)
    g = r % G
    at = first + r // G
    real = (r // G < P) & (at >= tl.load(LOW + tile)) & (at < high)
    row = (tl.load(BASE + tile) + at).to(tl.int64)
    d = tl.arange(0, DP)
    real_d = d < D
    q = tl.load(
        Q + row[:, None] * q_n + (h * G + g)[:, None] * q_h + d[None, :],
        mask=real[:, None] & real_d[None, :],
        other=0.0,
    )
    m = tl.full([BM], -1e30, tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DP], tl.float32)
    begin = 0
    if WINDOW:
        begin = tl.maximum(0, first + 1 - window) // BN * BN
    key_base = tl.load(KEYS + tile).to(tl.int64)
    for s in range(begin, first + 1, BN):
        t = s + tl.arange(0, BN)
        if PAGED:
            page = tl.load(TABLES + tile * W + t // BLOCK, mask=t < high, other=0).to(tl.int64)
            line = page * BLOCK + t % BLOCK
        else:
            line = key_base + t
        there = (t < high)[:, None] & real_d[None, :]
        k = tl.load(K + line[:, None] * k_n + h * k_h + d[None, :], mask=there, other=0.0)
        x = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if CAP:
            x = softcap * (2.0 / (1.0 + tl.exp(-2.0 * x / softcap)) - 1.0)
        seen = t[None, :] <= at[:, None]
        if WINDOW:
            seen = seen & (t[None, :] > at[:, None] - window)
        x = tl.where(seen, x, -1e30)
        new_m = tl.maximum(m, tl.max(x, 1))
        p = tl.where(seen, tl.exp(x - new_m[:, None]), 0.0)
        keep = tl.exp(m - new_m)
        total = total * keep + tl.sum(p, 1)
        v = tl.load(V + line[:, None] * v_n + h * v_h + d[None, :], mask=there, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * keep[:, None], input_precision=PRECISION)
        m = new_m
    out = (acc / total[:, None]).to(O.dtype.element_ty)
    tl.store(
        O + row[:, None] * (H * D) + (h * G + g)[:, None] * D + d[None, :],
        out,
        mask=real[:, None] & real_d[None, :],
    )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: exact_tiles.TilePlan,
    tables: Tensor | None,
    block: int,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    """Twin of `exact_attention.attend`; window and softcap 0 = none.

    No fused multiply-adds: whether the compiler may fuse must not depend on the code around an
    operation, which differs between the two ways of finding keys.
    """
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    heads = q.shape[1]
    size = q.shape[2]
    kv_heads = k.shape[1]
    groups = heads // kv_heads
    padded = max(16, triton.next_power_of_2(size))
    out = torch.empty(q.shape[0], heads, size, dtype=q.dtype, device=q.device)
    if not len(plan.first):
        return out
    _attend[(len(plan.first), kv_heads)](
        q,
        k,
        v,
        out,
        plan.first if tables is None else tables,
        plan.first,
        plan.base,
        plan.low,
        plan.high,
        plan.keys,
        scale,
        softcap,
        window,
        plan.positions,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        0 if tables is None else tables.stride(0),
        H=heads,
        G=groups,
        D=size,
        DP=padded,
        BLOCK=block,
        BM=exact_tiles.tile_shape(groups, True)[0],
        BN=exact_tiles.KEYS,
        CAP=softcap > 0,
        WINDOW=window > 0,
        PAGED=tables is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=2 if padded * q.element_size() <= 256 else 1,
        enable_fp_fusion=False,
    )
    return out
