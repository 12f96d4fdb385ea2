# mypy: disable-error-code="no-untyped-def"
"""Triton kernels for one new token per sequence on a GPU. Each has a plain-torch twin that defines
its result: `paged_decode` ↔ `attention.PagedLayout.attend`, `draw` ↔ `engines.native.sampler.draw`,
the others ↔ the function of the same name in `models.fused_decode`.

Legend: B sequences, H query heads, K key/value heads, G = H / K, D head size, V vocabulary, W cache
blocks per sequence, E hidden size.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

MULTIPROCESSORS = 132  # of an H200: what the sizes below were measured for
# so many programs share the keys of a sequence at most, and so many keys each of them has
SPLITS = 16
LEAST = 100
MOST = 8192
NOTHING = tl.constexpr(-1e30)  # the largest score of no keys at all
# a kernel may begin before the one before it has ended, up to where it reads what that one wrote
EARLY = os.environ.get("TRITON_INTERPRET") != "1" and torch.cuda.is_available()


def _early() -> dict[str, bool]:
    return {"launch_pdl": True} if EARLY else {}


# ---- between the matrix products ----


@triton.jit
def _add_norm(
    X, DELTA, WEIGHT, Y, E, rows, eps, PARTS: tl.constexpr, EARLY: tl.constexpr, BE: tl.constexpr
):
    """One program per row: X += the sum of the parts of DELTA, Y = RMS norm of X. Rounded where
    transformers rounds: the sum, the normed number, its product with the weight.
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


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """x [B, E] += delta ([B, E], or [parts, B, E] whose parts are summed), in place; the RMS norm
    of the sum.
    """
    rows, size = x.shape
    y = torch.empty_like(x)
    parts = 0 if delta is None else 1 if delta.ndim == 2 else delta.shape[0]
    _add_norm[(rows,)](
        x,
        x if delta is None else delta,
        weight,
        y,
        size,
        rows,
        eps,
        PARTS=parts,
        EARLY=EARLY,
        BE=triton.next_power_of_2(size),
        num_warps=8 if size > 2048 else 4,
        **_early(),
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
        BD=triton.next_power_of_2(size),
        num_warps=1,
    )
    return x


@triton.jit
def _silu(gate, up, DTYPE: tl.constexpr):
    """silu(gate)·up of float32 numbers, rounded where transformers rounds."""
    gate = gate.to(DTYPE).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(DTYPE).to(tl.float32)
    return (silu * up.to(DTYPE).to(tl.float32)).to(DTYPE)


@triton.jit
def _silu_mul(X, Y, N, EARLY: tl.constexpr, BN: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    gate = tl.load(X + row * 2 * N + n, mask=n < N, other=0.0).to(tl.float32)
    up = tl.load(X + row * 2 * N + N + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(Y + row * N + n, _silu(gate, up, Y.dtype.element_ty), mask=n < N)


def silu_mul(x: Tensor) -> Tensor:
    """silu(x[:, :N])·x[:, N:] of x [B, 2N]."""
    rows, size = x.shape[0], x.shape[1] // 2
    y = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    _silu_mul[(rows, triton.cdiv(size, 1024))](
        x, y, size, EARLY=EARLY, BN=1024, num_warps=4, **_early()
    )
    return y


# ---- matrix products of few rows: the weights are read once, at the speed of the memory ----


@triton.jit(do_not_specialize=["M"])
def _few_rows(
    X,
    W,
    BIAS,
    Y,
    M,
    N,
    K,
    x_m,
    PER,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    WIDE: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """One program per (tile of outputs, part of K); the tile of weights is the left factor, so that
    few rows fill a narrow tile. GATED: outputs n and N + n belong together, silu(·)·(·) of them is
    stored. WIDE: float32 parts [parts, M, N] are stored, for who adds them up.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    part = tl.program_id(1)
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    begin = part * PER
    end = tl.minimum(K, begin + PER)
    w_at = W + n.to(tl.int64)[:, None] * K + begin + k[None, :]
    u_at = w_at + N.to(tl.int64) * K
    x_at = X + m[None, :] * x_m + begin + k[:, None]
    acc = tl.zeros([BN, BM], tl.float32)
    acc_up = tl.zeros([BN, BM], tl.float32)
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
        acc = tl.dot(w, x, acc, input_precision=PRECISION)
        if GATED:
            u = tl.load(u_at, mask=w_there, other=0.0)
            acc_up = tl.dot(u, x, acc_up, input_precision=PRECISION)
            u_at += BK
        w_at += BK
        x_at += BK
    if HAS_BIAS:
        acc += tl.load(BIAS + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    there = (n < N)[:, None] & (m < M)[None, :]
    y_at = Y + (part.to(tl.int64) * M + m)[None, :] * N + n[:, None]
    if GATED:
        tl.store(y_at, _silu(acc, acc_up, Y.dtype.element_ty), mask=there)
    elif WIDE:
        tl.store(y_at, acc, mask=there)
    else:
        tl.store(y_at, acc.to(Y.dtype.element_ty), mask=there)


# up to so many rows, these products are faster than the library's, as measured on an H200: of any
# kind, with a gate, in parts
FEW_ROWS = 16
GATED_ROWS = 32
PART_ROWS = 64


def product_tile(rows: int, wide: bool, gated: bool) -> tuple[int, int, int, int]:
    """Outputs and inputs of a tile of weights, warps, and how many tiles are on their way, as
    measured on an H200.
    """
    if wide:
        return 32, 64, 4, 3
    if gated:
        return (32, 128, 4, 6) if rows <= 16 else (64, 64, 4, 5)
    return 64, 128, 4, 6 if rows <= 32 else 4


def few_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    parts: bool = False,
) -> Tensor:
    """x [B, K] times weight [N, K] transposed, plus bias. `gated`: silu(first half)·(second half)
    of the outputs. `parts`: [parts, B, N] in float32, whose sum is the product.
    """
    rows, inner = x.shape
    outer = weight.shape[0] // 2 if gated else weight.shape[0]
    assert weight.is_contiguous() and x.stride(1) == 1 and not (gated and parts)
    wide = x.dtype == torch.float32
    bn, bk, warps, stages = product_tile(rows, wide, gated)
    tiles = triton.cdiv(outer, bn)
    count = 1
    if parts:
        while tiles * count < 0.75 * MULTIPROCESSORS and count < 8:
            count *= 2
    per = triton.cdiv(triton.cdiv(inner, bk), count) * bk
    count = triton.cdiv(inner, per)
    shape = (count, rows, outer) if parts else (rows, outer)
    y = torch.empty(shape, dtype=torch.float32 if parts else x.dtype, device=x.device)
    _few_rows[(tiles, count)](
        x,
        weight,
        weight if bias is None else bias,
        y,
        rows,
        outer,
        inner,
        x.stride(0),
        per,
        HAS_BIAS=bias is not None,
        GATED=gated,
        WIDE=parts,
        EVEN=inner % bk == 0,
        PRECISION="ieee" if wide else "tf32",
        EARLY=EARLY,
        BM=max(16, triton.next_power_of_2(rows)),
        BN=bn,
        BK=bk,
        num_warps=warps,
        num_stages=stages,
        **_early(),
    )
    return y


@triton.jit(do_not_specialize=["M"])
def _add_low_rank(
    Y,
    T,
    UP,
    scale,
    M,
    N,
    y_m,
    R: tl.constexpr,
    RP: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    r = tl.arange(0, RP)
    up_there = (n < N)[:, None] & (r < R)[None, :]
    up = tl.load(UP + n[:, None] * R + r[None, :], mask=up_there, other=0.0)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    t_there = (m < M)[None, :] & (r < R)[:, None]
    t = tl.load(T + m[None, :] * R + r[:, None], mask=t_there, other=0.0)
    more = tl.dot(up, t, input_precision=PRECISION) * scale
    there = (n < N)[:, None] & (m < M)[None, :]
    at = Y + m.to(tl.int64)[None, :] * y_m + n[:, None]
    y = tl.load(at, mask=there, other=0.0)
    tl.store(at, (y.to(tl.float32) + more).to(Y.dtype.element_ty), mask=there)


def add_low_rank(y: Tensor, narrow: Tensor, up: Tensor, scale: float) -> None:
    """y [B, N] += scale·narrow [B, R] times up [N, R] transposed; rows of y may lie apart."""
    rows, outer = y.shape
    rank = narrow.shape[1]
    _add_low_rank[(triton.cdiv(rows, 16), triton.cdiv(outer, 128))](
        y,
        narrow,
        up,
        scale,
        rows,
        outer,
        y.stride(0),
        R=rank,
        RP=max(16, triton.next_power_of_2(rank)),
        PRECISION="ieee" if up.dtype == torch.float32 else "tf32",
        EARLY=EARLY,
        BM=16,
        BN=128,
        num_warps=4,
        **_early(),
    )


# ---- attention of one new token per sequence over the paged cache ----


@triton.jit
def _turned(X, at, d, cos, sin, there, D: tl.constexpr):
    """Numbers of a head after their rotation, x·cos + rotate_half(x)·sin, rounded where
    transformers rounds: each product, then the sum. `at` [.., 1] or scalar: where heads begin.
    """
    x = tl.load(X + at + d, mask=there, other=0.0)
    low = d < D // 2
    other = tl.load(X + at + tl.where(low, d + D // 2, d - D // 2), mask=there, other=0.0)
    other = tl.where(low, -other, other)
    first = (x.to(tl.float32) * cos.to(tl.float32)).to(x.dtype)
    second = (other.to(tl.float32) * sin.to(tl.float32)).to(x.dtype)
    return (first.to(tl.float32) + second.to(tl.float32)).to(x.dtype)


@triton.jit
def _capped(x, softcap, CAP: tl.constexpr):
    """softcap·tanh(x / softcap), where there is a cap."""
    if CAP:
        x = softcap * (2.0 / (1.0 + tl.exp(-2.0 * x / softcap)) - 1.0)
    return x


@triton.jit
def _attend_keys(
    q,
    m,
    total,
    acc,
    KC,
    VC,
    TABLE,
    h,
    begin,
    end,
    first,
    scale,
    softcap,
    d,
    HK: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BN: tl.constexpr,
    CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Online softmax of queries q over the keys [begin, end) of one sequence, those before `first`
    left out; begin is a multiple of BN.
    """
    real_d = d < D
    for s in range(begin, end, BN):
        t = s + tl.arange(0, BN)
        seen = (t < end) & (t >= first)
        page = tl.load(TABLE + t // BLOCK, mask=t < end, other=0).to(tl.int64)
        at = ((page * BLOCK + t % BLOCK) * HK + h) * D
        there = seen[:, None] & real_d[None, :]
        k = tl.load(KC + at[:, None] + d[None, :], mask=there, other=0.0)
        x = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        x = _capped(x, softcap, CAP)
        x = tl.where(seen[None, :], x, NOTHING)
        new_m = tl.maximum(m, tl.max(x, 1))
        p = tl.exp(x - new_m[:, None])
        keep = tl.exp(m - new_m)
        v = tl.load(VC + at[:, None] + d[None, :], mask=there, other=0.0)
        acc = acc * keep[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        total = total * keep + tl.sum(p, 1)
        m = new_m
    return m, total, acc


@triton.jit
def _paged_decode(
    Q,
    KN,
    VN,
    COS,
    SIN,
    KC,
    VC,
    O,
    TABLES,
    CACHED,
    S_TOP,
    S_SUM,
    S_ACC,
    scale,
    softcap,
    window,
    q_b,
    q_h,
    kn_b,
    kn_h,
    vn_b,
    vn_h,
    cos_n,
    W,
    HK: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
    BN: tl.constexpr,
    PARTS: tl.constexpr,
    ROPE: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per (sequence, key head, part of its keys). The first part stores the new key and
    value and begins with them; `_join_parts` joins the parts.
    """
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    part = tl.program_id(2)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    n = tl.load(CACHED + b).to(tl.int32)  # tokens before the new one
    d = tl.arange(0, DP)
    g = tl.arange(0, GP)
    real_d = d < D
    real = (g < G)[:, None] & real_d[None, :]
    first = 0
    if WINDOW:
        first = tl.maximum(0, n + 1 - window)
    begin = first // BN * BN
    span = tl.cdiv(tl.cdiv(n - begin, PARTS), BN) * BN
    low = begin + part * span
    line = (b * PARTS + part) * HK * G + h * G + g
    if PARTS > 1:  # noqa: SIM102  (known when it is compiled)
        if (part > 0) & (low >= n):
            tl.store(S_TOP + line, tl.full([GP], NOTHING, tl.float32), mask=g < G)
            tl.store(S_SUM + line, tl.zeros([GP], tl.float32), mask=g < G)
            return
    if ROPE:
        cos = tl.load(COS + n.to(tl.int64) * cos_n + d, mask=real_d, other=0.0)
        sin = tl.load(SIN + n.to(tl.int64) * cos_n + d, mask=real_d, other=0.0)
        at = b * q_b + (h * G + g)[:, None] * q_h
        q = _turned(Q, at, d[None, :], cos[None, :], sin[None, :], real, D)
    else:
        q = tl.load(Q + b * q_b + (h * G + g)[:, None] * q_h + d[None, :], mask=real, other=0.0)
    m = tl.full([GP], NOTHING, tl.float32)
    total = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, DP], tl.float32)
    if part == 0:
        if ROPE:
            k_new = _turned(KN, b * kn_b + h * kn_h, d, cos, sin, real_d, D)
        else:
            k_new = tl.load(KN + b * kn_b + h * kn_h + d, mask=real_d, other=0.0)
        v_new = tl.load(VN + b * vn_b + h * vn_h + d, mask=real_d, other=0.0)
        slot = tl.load(TABLES + b * W + n // BLOCK).to(tl.int64) * BLOCK + n % BLOCK
        tl.store(KC + (slot * HK + h) * D + d, k_new, mask=real_d)
        tl.store(VC + (slot * HK + h) * D + d, v_new, mask=real_d)
        m = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], 1) * scale
        m = _capped(m, softcap, CAP)
        total = tl.full([GP], 1.0, tl.float32)
        acc = tl.zeros([GP, DP], tl.float32) + v_new.to(tl.float32)[None, :]
    high = tl.minimum(n, low + span)
    m, total, acc = _attend_keys(
        q, m, total, acc, KC, VC, TABLES + b * W, h, low, high, first, scale, softcap, d,
        HK, D, BLOCK, BN, CAP, PRECISION,
    )  # fmt: skip
    if PARTS > 1:
        tl.store(S_TOP + line, m, mask=g < G)
        tl.store(S_SUM + line, total, mask=g < G)
        tl.store(S_ACC + line[:, None] * D + d[None, :], acc, mask=real)
    else:
        row = b * HK * G + h * G + g
        out = (acc / total[:, None]).to(O.dtype.element_ty)
        tl.store(O + row[:, None] * D + d[None, :], out, mask=real)


@triton.jit
def _join_parts(
    S_TOP,
    S_SUM,
    S_ACC,
    O,
    H,
    D: tl.constexpr,
    DP: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per (sequence, query head): what the parts of its keys gave, as one."""
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    part = tl.arange(0, PARTS)
    d = tl.arange(0, DP)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    line = (b * PARTS + part) * H + h
    top = tl.load(S_TOP + line)
    share = tl.exp(top - tl.max(top, 0))
    total = tl.sum(share * tl.load(S_SUM + line), 0)
    there = (top > NOTHING)[:, None] & (d < D)[None, :]
    acc = tl.load(S_ACC + line[:, None] * D + d[None, :], mask=there, other=0.0)
    out = tl.sum(acc * share[:, None], 0) / total
    tl.store(O + (b * H + h) * D + d, out.to(O.dtype.element_ty), mask=d < D)


def parts_of(rows: int, kv_heads: int, longest: int) -> int:
    """How many programs share the keys of a sequence, where none has more than `longest`: about
    four programs for each multiprocessor, each with enough keys.
    """
    parts = 1
    while parts < SPLITS and parts * LEAST < longest:
        enough = rows * kv_heads * parts * 2 > 4 * MULTIPROCESSORS
        if enough and parts * MOST >= longest:
            break
        parts *= 2
    return parts


def attention_tile(rows: int, kv_heads: int) -> dict[str, int]:
    """Keys of a tile, warps, and tiles on their way, as measured on an H200."""
    if rows * kv_heads < MULTIPROCESSORS:
        return {"BN": 128, "num_warps": 4, "num_stages": 4}
    return {"BN": 64, "num_warps": 2, "num_stages": 2}


def paged_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    cached: Tensor,
    scale: float,
    window: int,
    softcap: float,
    *,
    parts: int = 1,
    rope: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """q [B, H, D] and new k, v [B, K, D] against the cache [blocks, BLOCK, K, D]; writes k and v
    there. window/softcap 0 = none. `parts` programs share the keys of a sequence. `rope`: cos and
    sin [positions, D] by which q and k are turned first.
    """
    rows, heads, size = q.shape
    kv_heads = keys.shape[2]
    per_key = heads // kv_heads
    device = q.device
    wide = triton.next_power_of_2(size)
    cos, sin = rope if rope is not None else (q, q)
    shape = {"D": size, "DP": max(16, wide), "BLOCK": keys.shape[1], "HK": kv_heads, "G": per_key}
    kind = {
        "ROPE": rope is not None,
        "CAP": softcap > 0,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "EARLY": EARLY,
    }
    out = torch.empty(rows, heads, size, dtype=q.dtype, device=device)
    found = _partial(rows, parts, heads, size, device) if parts > 1 else (out, out, out)
    _paged_decode[(rows, kv_heads, parts)](
        q,
        k,
        v,
        cos,
        sin,
        keys,
        values,
        out,
        tables,
        cached,
        *found,
        scale,
        softcap,
        window,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        cos.stride(0),
        tables.stride(0),
        GP=max(16, triton.next_power_of_2(per_key)),
        PARTS=parts,
        WINDOW=window > 0,
        **attention_tile(rows, kv_heads),
        **shape,
        **kind,
        **_early(),
    )
    if parts > 1:
        _join_parts[(rows, heads)](
            *found,
            out,
            heads,
            D=size,
            DP=shape["DP"],
            PARTS=parts,
            EARLY=EARLY,
            num_warps=4 if parts * size > 1024 else 1,
            **_early(),
        )
    return out


def _partial(
    rows: int, parts: int, heads: int, size: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the largest scores, the sums and the weighted values of parts of the keys."""
    top, total = (
        torch.empty(rows, parts, heads, dtype=torch.float32, device=device) for _ in range(2)
    )
    acc = torch.empty(rows, parts, heads, size, dtype=torch.float32, device=device)
    return top, total, acc


# ---- drawing a token ----


@triton.jit
def _mix(x):
    """splitmix64's finaliser on unsigned integers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _scores(LOGITS, row, stride, at, V, scale, softcap, inverse, CAP: tl.constexpr):
    """Logits of one row after the architecture's rule and the temperature; -inf past the end."""
    x = tl.load(LOGITS + row * stride + at, mask=at < V, other=0.0).to(tl.float32) * scale
    return tl.where(at < V, _capped(x, softcap, CAP) * inverse, -float("inf"))


@triton.jit
def _draw_chunks(
    LOGITS,
    TEMPERATURES,
    TOP,
    SUM,
    BEST,
    stride,
    V,
    scale,
    softcap,
    CAP: tl.constexpr,
    BV: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per (row, chunk of the vocabulary): its largest score, where, and Σ exp."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    temperature = tl.load(TEMPERATURES + row)
    inverse = 1.0 / tl.where(temperature == 0.0, 1.0, temperature)
    at = chunk * BV + tl.arange(0, BV)
    z = _scores(LOGITS, row, stride, at, V, scale, softcap, inverse, CAP)
    top = tl.max(z, 0)
    line = row * tl.num_programs(1) + chunk
    tl.store(TOP + line, top)
    # a chunk of masked tokens has no largest score to subtract
    tl.store(SUM + line, tl.sum(tl.exp(z - tl.where(top == -float("inf"), 0.0, top)), 0))
    tl.store(BEST + line, chunk * BV + tl.argmax(z, 0))


@triton.jit
def _draw_pick(
    LOGITS,
    TEMPERATURES,
    SEEDS,
    POSITIONS,
    TOP,
    SUM,
    BEST,
    TOKENS,
    LOGPROBS,
    stride,
    V,
    scale,
    softcap,
    chunks,
    CAP: tl.constexpr,
    BV: tl.constexpr,
    BC: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per row: the chunk in which the cumulative distribution crosses u, then the token
    in it.
    """
    row = tl.program_id(0).to(tl.int64)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    temperature = tl.load(TEMPERATURES + row)
    greedy = temperature == 0.0
    inverse = 1.0 / tl.where(greedy, 1.0, temperature)
    c = tl.arange(0, BC)
    tops = tl.load(TOP + row * chunks + c, mask=c < chunks, other=-float("inf"))
    sums = tl.load(SUM + row * chunks + c, mask=c < chunks, other=0.0)
    top = tl.max(tops, 0)
    mass = sums * tl.exp(tops - top)
    up_to = tl.cumsum(mass, 0)
    total = tl.max(up_to, 0)
    seed = tl.load(SEEDS + row).to(tl.uint64)
    position = (tl.load(POSITIONS + row) + 1).to(tl.uint64)
    bits = _mix(seed + position * 0x9E3779B97F4A7C15) >> 40
    target = (bits.to(tl.float32) + 0.5) * (1.0 / 16777216.0) * total
    chunk = tl.min(tl.where((up_to > target) & (mass > 0), c, BC), 0)
    # u next to 1 may round past the end: then it is the last chunk that has any mass
    chunk = tl.where(chunk < BC, chunk, tl.max(tl.where(mass > 0, c, 0), 0))
    before = tl.sum(tl.where(c == chunk, up_to - mass, 0.0), 0)
    v = tl.arange(0, BV)
    at = chunk * BV + v
    p = tl.exp(_scores(LOGITS, row, stride, at, V, scale, softcap, inverse, CAP) - top)
    cdf = before + tl.cumsum(p, 0)
    index = tl.min(tl.where((cdf > target) & (p > 0), v, BV), 0)
    index = tl.where(index < BV, index, tl.max(tl.where(p > 0, v, 0), 0))
    likeliest = tl.min(tl.where(tops == top, c, BC), 0)
    best = tl.load(BEST + row * chunks + likeliest)
    picked = tl.where(greedy, best, chunk * BV + index)
    z = _scores(LOGITS, row, stride, picked, V, scale, softcap, inverse, CAP)
    tl.store(TOKENS + row, picked.to(tl.int64))
    tl.store(LOGPROBS + row, z - top - tl.log(total))


def draw(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Tokens [B] int64 and log-probs [B] float32 from raw logits [B, V] in any precision;
    temperature 0 is greedy.
    """
    rows, vocabulary = logits.shape
    device = logits.device
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=device)
    size = min(4096, triton.next_power_of_2(vocabulary))
    chunks = triton.cdiv(vocabulary, size)
    top, total = (torch.empty(rows, chunks, dtype=torch.float32, device=device) for _ in range(2))
    best = torch.empty(rows, chunks, dtype=torch.int32, device=device)
    rule = (logits.stride(0), vocabulary, scale, softcap or 0.0)
    kind = {"CAP": softcap is not None, "BV": size, "EARLY": EARLY, **_early()}
    _draw_chunks[(rows, chunks)](logits, temperatures, top, total, best, *rule, num_warps=8, **kind)
    _draw_pick[(rows,)](
        logits,
        temperatures,
        seeds,
        positions,
        top,
        total,
        best,
        tokens,
        logprobs,
        *rule,
        chunks,
        BC=triton.next_power_of_2(chunks),
        num_warps=8,
        **kind,
    )
    return tokens, logprobs


@triton.jit
def _advance(
    PICKED, NEWEST, CACHED, PRODUCED, LIMITS, DONE, STOPS, S, BS: tl.constexpr, EARLY: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    picked = tl.load(PICKED + row)
    done = tl.load(DONE + row) != 0
    live = tl.where(done, 0, 1)
    s = tl.arange(0, BS)
    ends = tl.load(STOPS + row * S + s, mask=s < S, other=-1) == picked
    produced = tl.load(PRODUCED + row) + live
    tl.store(NEWEST + row, tl.where(done, tl.load(NEWEST + row), picked))
    tl.store(CACHED + row, tl.load(CACHED + row) + live)
    tl.store(PRODUCED + row, produced)
    ended = (tl.max(ends.to(tl.int32), 0) > 0) | (produced >= tl.load(LIMITS + row))
    tl.store(DONE + row, done | ended)


def advance(
    picked: Tensor,
    newest: Tensor,
    cached: Tensor,
    produced: Tensor,
    limits: Tensor,
    done: Tensor,
    stops: Tensor,
) -> None:
    """Twin of `DecodeBatch.advance`, in place: [B] each, stops [B, S]."""
    _advance[(len(picked),)](
        picked,
        newest,
        cached,
        produced,
        limits,
        done,
        stops,
        stops.shape[1],
        BS=triton.next_power_of_2(stops.shape[1]),
        EARLY=EARLY,
        num_warps=1,
        **_early(),
    )
