# mypy: disable-error-code="no-untyped-def"
"""Attention of one new token per sequence over the paged cache. Twin:
`attention.PagedLayout.attend`.

Legend: B sequences, H query heads, K key/value heads, G = H / K, D head size, DV that of values, W
cache blocks per sequence.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from reinforge.models.attention_rule import AttentionRule
from reinforge.models.kernels.common import (
    HAS_TMA,
    MULTIPROCESSORS,
    capped,
    early,
    lines,
    next_power,
    page_of,
)
from reinforge.models.kernels.fp8 import quantised

# so many programs share the keys of a sequence at most, and so many keys each of them has
SPLITS = 16
LEAST = 100
MOST = 8192
NOTHING = tl.constexpr(-1e30)  # the largest score of no keys at all
LOG2E = tl.constexpr(1.4426950408889634)  # e^x = 2^(x·LOG2E)


@triton.jit
def turned(X, at, d, cos, sin, there, D: tl.constexpr):
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
def _scores(x, scale, softcap, CAP: tl.constexpr):
    """What products of queries and keys count, as exponents of 2."""
    if CAP:
        return capped(x * scale, softcap, CAP) * LOG2E
    else:
        return x * (scale * LOG2E)


@triton.jit
def _attend_tile(
    q,
    m,
    total,
    acc,
    KC,
    VC,
    KS,
    VS,
    TABLE,
    h,
    s,
    end,
    first,
    scale,
    softcap,
    d,
    dv,
    HK: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    DV: tl.constexpr,
    DVP: tl.constexpr,
    BLOCK: tl.constexpr,
    BN: tl.constexpr,
    CAP: tl.constexpr,
    FP8: tl.constexpr,
    MASKED: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The next tile of keys, from s on; not MASKED: all of them are there and seen. See
    `_attend_keys`. TMA: KC and VC are tensor descriptors, and a block has room for whole tiles.
    """
    t = s + tl.arange(0, BN)
    seen = (t < end) & (t >= first)
    page = page_of(TABLE, t, s, end, BLOCK, BN, MASKED)
    if TMA:
        line = (page * BLOCK + s % BLOCK).to(tl.int32)
        k = KC.load([line, h * D])
    else:
        head = (page * BLOCK + t % BLOCK) * HK + h
        k = lines(KC, head * D, d, seen, D, DP, MASKED).to(q.dtype)
    x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if FP8:
        line = (page * HK + h) * BLOCK + t % BLOCK
        x *= tl.load(KS + line, mask=seen, other=0.0)[None, :]
    x = _scores(x, scale, softcap, CAP)
    if MASKED:
        x = tl.where(seen[None, :], x, NOTHING)
    new_m = tl.maximum(m, tl.max(x, 1))
    p = tl.exp2(x - new_m[:, None])
    keep = tl.exp2(m - new_m)
    if TMA:
        v = VC.load([line, h * DV])
    else:
        v = lines(VC, head * DV, dv, seen, DV, DVP, MASKED).to(q.dtype)
    acc = acc * keep[:, None]
    if FP8:
        # as shares of the largest, so that small ones are not lost in 16 bits
        vs = tl.load(VS + line, mask=seen, other=0.0)
        most = tl.maximum(tl.max(vs, 0), 1e-30)
        share = (p * (vs / most)[None, :]).to(q.dtype)
        acc += tl.dot(share, v, input_precision=PRECISION) * most
    else:
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    total = total * keep + tl.sum(p, 1)
    return new_m, total, acc


@triton.jit
def _attend_keys(
    q,
    m,
    total,
    acc,
    KC,
    VC,
    KD,
    VD,
    KS,
    VS,
    TABLE,
    h,
    begin,
    end,
    first,
    scale,
    softcap,
    d,
    dv,
    HK: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    DV: tl.constexpr,
    DVP: tl.constexpr,
    BLOCK: tl.constexpr,
    BN: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    FP8: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Online softmax, to the base of 2, of queries q over the keys [begin, end) of one sequence,
    those before `first` left out; begin is a multiple of BN. Without a window only the last tile
    has to be masked; the others come by the descriptors KD and VD of the same cache (TMA).
    FP8: keys and values have scales KS and VS, which are multiplied with scores and shares, so that
    the numbers of the cache go into the products as they are.
    """
    if WINDOW:
        for s in range(begin, end, BN):
            m, total, acc = _attend_tile(
                q, m, total, acc, KC, VC, KS, VS, TABLE, h, s, end, first, scale, softcap, d,
                dv, HK, D, DP, DV, DVP, BLOCK, BN, CAP, FP8, True, False, PRECISION,
            )  # fmt: skip
    else:
        whole = begin + tl.maximum(end - begin, 0) // BN * BN
        for s in range(begin, whole, BN):
            m, total, acc = _attend_tile(
                q, m, total, acc, KD, VD, KS, VS, TABLE, h, s, end, first, scale, softcap, d,
                dv, HK, D, DP, DV, DVP, BLOCK, BN, CAP, FP8, False, TMA, PRECISION,
            )  # fmt: skip
        if whole < end:
            m, total, acc = _attend_tile(
                q, m, total, acc, KC, VC, KS, VS, TABLE, h, whole, end, first, scale, softcap, d,
                dv, HK, D, DP, DV, DVP, BLOCK, BN, CAP, FP8, True, False, PRECISION,
            )  # fmt: skip
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
    KD,
    VD,
    KS,
    VS,
    O,
    TABLES,
    CACHED,
    S_TOP,
    S_SUM,
    S_ACC,
    SINKS,
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
    DV: tl.constexpr,
    DVP: tl.constexpr,
    BLOCK: tl.constexpr,
    BN: tl.constexpr,
    PARTS: tl.constexpr,
    ROPE: tl.constexpr,
    CAP: tl.constexpr,
    SINK: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    FP8: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per (sequence, key head, part of its keys). The first part stores the new key and
    value and begins with them, and with the sinks (SINK), whose values are 0; `_join_parts` joins
    the parts. CHUNKED: `window` is the size of chunks.
    """
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    part = tl.program_id(2)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    n = tl.load(CACHED + b).to(tl.int32)  # tokens before the new one
    d = tl.arange(0, DP)
    dv = tl.arange(0, DVP)
    g = tl.arange(0, GP)
    real_d = d < D
    real_v = dv < DV
    real = (g < G)[:, None] & real_d[None, :]
    first = 0
    if CHUNKED:
        first = n // window * window
    elif WINDOW:
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
        q = turned(Q, at, d[None, :], cos[None, :], sin[None, :], real, D)
    else:
        q = tl.load(Q + b * q_b + (h * G + g)[:, None] * q_h + d[None, :], mask=real, other=0.0)
    m = tl.full([GP], NOTHING, tl.float32)
    total = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, DVP], tl.float32)
    if part == 0:
        if ROPE:
            k_new = turned(KN, b * kn_b + h * kn_h, d, cos, sin, real_d, D)
        else:
            k_new = tl.load(KN + b * kn_b + h * kn_h + d, mask=real_d, other=0.0)
        v_new = tl.load(VN + b * vn_b + h * vn_h + dv, mask=real_v, other=0.0)
        page = tl.load(TABLES + b * W + n // BLOCK).to(tl.int64)
        slot = page * BLOCK + n % BLOCK
        k_new = k_new.to(tl.float32)
        v_new = v_new.to(tl.float32)
        if FP8:
            kq, ks = quantised(k_new)
            vq, vs = quantised(v_new)
            tl.store(KC + (slot * HK + h) * D + d, kq, mask=real_d)
            tl.store(VC + (slot * HK + h) * DV + dv, vq, mask=real_v)
            tl.store(KS + (page * HK + h) * BLOCK + n % BLOCK, ks)
            tl.store(VS + (page * HK + h) * BLOCK + n % BLOCK, vs)
            k_new = kq.to(tl.float32) * ks
            v_new = vq.to(tl.float32) * vs
        else:
            tl.store(KC + (slot * HK + h) * D + d, k_new.to(KC.dtype.element_ty), mask=real_d)
            tl.store(VC + (slot * HK + h) * DV + dv, v_new.to(VC.dtype.element_ty), mask=real_v)
        m = _scores(tl.sum(q.to(tl.float32) * k_new[None, :], 1), scale, softcap, CAP)
        total = tl.full([GP], 1.0, tl.float32)
        acc = tl.zeros([GP, DVP], tl.float32) + v_new[None, :]
        if SINK:
            sink = tl.load(SINKS + h * G + g, mask=g < G, other=0.0).to(tl.float32) * LOG2E
            own = m
            m = tl.maximum(own, sink)
            share = tl.exp2(own - m)
            total = share + tl.exp2(sink - m)
            acc = acc * share[:, None]
    if FP8 and q.dtype == tl.bfloat16:
        q = q.to(tl.float16)  # what a GPU turns FP8 into with one instruction
    high = tl.minimum(n, low + span)
    m, total, acc = _attend_keys(
        q, m, total, acc, KC, VC, KD, VD, KS, VS, TABLES + b * W, h, low, high, first, scale,
        softcap, d, dv, HK, D, DP, DV, DVP, BLOCK, BN, CAP, WINDOW, FP8, TMA, PRECISION,
    )  # fmt: skip
    there = (g < G)[:, None] & real_v[None, :]
    if PARTS > 1:
        tl.store(S_TOP + line, m, mask=g < G)
        tl.store(S_SUM + line, total, mask=g < G)
        tl.store(S_ACC + line[:, None] * DV + dv[None, :], acc, mask=there)
    else:
        row = b * HK * G + h * G + g
        out = (acc / total[:, None]).to(O.dtype.element_ty)
        tl.store(O + row[:, None] * DV + dv[None, :], out, mask=there)


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
    share = tl.exp2(top - tl.max(top, 0))
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


def attention_tile(rows: int, kv_heads: int, tma: bool, key_bytes: int) -> dict[str, int]:
    """Keys of a tile, warps, and tiles on their way, as measured on an H200. `tma`: whole tiles
    come by a descriptor. Keys of many bytes come few at a time, to fit a multiprocessor.
    """
    if tma:
        return {"BN": TILE, "num_warps": 1, "num_stages": 2}
    if key_bytes > 512:
        return {"BN": 32, "num_warps": 4, "num_stages": 2}
    if rows * kv_heads < MULTIPROCESSORS:
        return {"BN": 128, "num_warps": 4, "num_stages": 2}
    return {"BN": 64, "num_warps": 2, "num_stages": 2}


TILE = 64  # keys that come by a descriptor at once
NARROW = 64  # heads of this size do; with larger ones it is slower, as measured on an H200


def descriptors(
    rows: int, keys: Tensor, values: Tensor
) -> tuple[TensorDescriptor, TensorDescriptor] | None:
    """Tiles of the cache [blocks, BLOCK, K, D] that one instruction of a GPU fetches, a head at a
    time; None: it is not faster so, or blocks have no room for whole tiles.
    """
    blocks, block, heads, size = keys.shape
    if rows * heads < MULTIPROCESSORS or size != NARROW or values.shape != keys.shape:
        return None
    if block % TILE or keys.element_size() == 1:
        return None
    first, second = (
        TensorDescriptor(part, [blocks * block, heads * size], [heads * size, 1], [TILE, size])
        for part in (keys, values)
    )
    return first, second


def paged_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    cached: Tensor,
    rule: AttentionRule,
    *,
    parts: int = 1,
    rope: tuple[Tensor, Tensor] | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """q [B, H, D] and new k, v [B, K, D] against the cache [blocks, BLOCK, K, D], where values may
    have a D of their own; writes k and v there. `parts` programs share the keys of a sequence.
    `rope`: cos and sin [positions, D] by which q and k are turned first. `scales` [blocks, K,
    BLOCK] of keys and values: the cache is FP8.
    """
    window = rule.chunk or rule.window or 0
    softcap = rule.softcap or 0.0
    rows, heads, size = q.shape
    kv_heads = keys.shape[2]
    per_key = heads // kv_heads
    device = q.device
    value_size = values.shape[3]
    cos, sin = rope if rope is not None else (q, q)
    shape = {"D": size, "DP": padded(size), "DV": value_size, "DVP": padded(value_size)}
    shape |= {"BLOCK": keys.shape[1], "HK": kv_heads, "G": per_key}
    kind = {
        "ROPE": rope is not None,
        "FP8": scales is not None,
        "CAP": softcap > 0,
        "SINK": rule.sinks is not None,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
    }
    out = torch.empty(rows, heads, value_size, dtype=q.dtype, device=device)
    found = (out, out, out)
    if parts > 1:
        found = room_for_parts(rows, parts, heads, value_size, device)
    tiles = descriptors(rows, keys, values) if HAS_TMA and not window else None
    _paged_decode[(rows, kv_heads, parts)](
        q,
        k,
        v,
        cos,
        sin,
        keys,
        values,
        *(tiles or (keys, values)),
        *(scales or (out, out)),
        out,
        tables,
        cached,
        *found,
        out if rule.sinks is None else rule.sinks,
        rule.scale,
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
        GP=max(16, next_power(per_key)),
        PARTS=parts,
        WINDOW=window > 0,
        CHUNKED=rule.chunk is not None,
        TMA=tiles is not None,
        **attention_tile(rows, kv_heads, tiles is not None, shape["DP"] * q.element_size()),
        **shape,
        **kind,
        **early(),
    )
    if parts > 1:
        _join_parts[(rows, heads)](
            *found,
            out,
            heads,
            D=value_size,
            DP=shape["DVP"],
            PARTS=parts,
            num_warps=4 if parts * value_size > 1024 else 1,
            **early(),
        )
    return out


def padded(size: int) -> int:
    """Numbers of a head in a tile."""
    return max(16, next_power(size))


def room_for_parts(
    rows: int, parts: int, heads: int, size: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the largest scores, the sums and the weighted values of parts of the keys."""
    top, total = (
        torch.empty(rows, parts, heads, dtype=torch.float32, device=device) for _ in range(2)
    )
    acc = torch.empty(rows, parts, heads, size, dtype=torch.float32, device=device)
    return top, total, acc


# ---- rotation by itself, where rows are neighbours in one sequence ----


@triton.jit
def _rotate_and_store(
    Q,
    KN,
    VN,
    COS,
    SIN,
    KC,
    VC,
    QO,
    KO,
    WHERE,
    POSITIONS,
    q_b,
    q_h,
    kn_b,
    kn_h,
    vn_b,
    vn_h,
    cos_n,
    W,
    H: tl.constexpr,
    HK: tl.constexpr,
    HP: tl.constexpr,
    KP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
    TABLES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per row, all heads of it. TABLES: WHERE has the blocks of its sequence, otherwise
    its slot.
    """
    b = tl.program_id(0).to(tl.int64)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    n = tl.load(POSITIONS + b)
    d = tl.arange(0, DP)[None, :]
    h = tl.arange(0, HP)[:, None]
    cos = tl.load(COS + n * cos_n + d, mask=d < D, other=0.0)
    sin = tl.load(SIN + n * cos_n + d, mask=d < D, other=0.0)
    there = (h < H) & (d < D)
    q = turned(Q, b * q_b + h * q_h, d, cos, sin, there, D)
    tl.store(QO + (b * H + h) * D + d, q, mask=there)
    h = tl.arange(0, KP)[:, None]
    there = (h < HK) & (d < D)
    k = turned(KN, b * kn_b + h * kn_h, d, cos, sin, there, D)
    v = tl.load(VN + b * vn_b + h * vn_h + d, mask=there, other=0.0)
    if TABLES:
        slot = tl.load(WHERE + b * W + n // BLOCK) * BLOCK + n % BLOCK
    else:
        slot = tl.load(WHERE + b * W)
    tl.store(KO + (b * HK + h) * D + d, k, mask=there)
    tl.store(KC + (slot * HK + h) * D + d, k, mask=there)
    tl.store(VC + (slot * HK + h) * D + d, v, mask=there)


def rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    where: Tensor,
    positions: Tensor,
    rope: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """q [B, H, D] and k [B, K, D] turned by their positions [B]; k and v are written to the cache
    [blocks, BLOCK, K, D]: `where` the blocks of each row's sequence are [B, W], or at the flat
    places [B] of rows. `rope`: cos and sin [positions, D].

    No fused multiply-adds: products are rounded before they are added, as torch does it.
    """
    rows, heads, size = q.shape
    kv_heads = k.shape[1]
    cos, sin = rope
    q_out = torch.empty(rows, heads, size, dtype=q.dtype, device=q.device)
    k_out = torch.empty(rows, kv_heads, size, dtype=k.dtype, device=k.device)
    _rotate_and_store[(rows,)](
        q,
        k,
        v,
        cos,
        sin,
        keys,
        values,
        q_out,
        k_out,
        where,
        positions,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        cos.stride(0),
        where.stride(0),
        H=heads,
        HK=kv_heads,
        HP=next_power(heads),
        KP=next_power(kv_heads),
        D=size,
        DP=next_power(size),
        BLOCK=keys.shape[1],
        TABLES=where.ndim == 2,
        num_warps=4,
        enable_fp_fusion=False,
        **early(),
    )
    return q_out, k_out
