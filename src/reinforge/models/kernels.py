# mypy: disable-error-code="no-untyped-def"
"""Triton kernels for decoding on a GPU. Each has a plain-torch twin that defines its result:
`paged_decode` ↔ `attention.PagedLayout.attend`, `draw` ↔ `engines.native.sampling.draw`.

Legend: B sequences, H query heads, K key/value heads, G = H / K, D head size, V vocabulary, W cache
blocks per sequence.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _paged_decode(
    Q,
    KN,
    VN,
    KC,
    VC,
    O,
    TABLES,
    CACHED,
    scale,
    softcap,
    window,
    q_b,
    q_h,
    kn_b,
    kn_h,
    vn_b,
    vn_h,
    W,
    HK: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
    BN: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per (sequence, key head): stores the new key and value, then attends with its G
    query heads at once.
    """
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    n = tl.load(CACHED + b).to(tl.int32)  # tokens before the new one
    d = tl.arange(0, DP)
    g = tl.arange(0, GP)
    real_d = d < D
    q = tl.load(
        Q + b * q_b + (h * G + g)[:, None] * q_h + d[None, :],
        mask=(g < G)[:, None] & real_d[None, :],
        other=0.0,
    )
    k_new = tl.load(KN + b * kn_b + h * kn_h + d, mask=real_d, other=0.0)
    v_new = tl.load(VN + b * vn_b + h * vn_h + d, mask=real_d, other=0.0)
    slot = tl.load(TABLES + b * W + n // BLOCK).to(tl.int64) * BLOCK + n % BLOCK
    tl.store(KC + (slot * HK + h) * D + d, k_new, mask=real_d)
    tl.store(VC + (slot * HK + h) * D + d, v_new, mask=real_d)

    m = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], 1) * scale
    if CAP:
        m = softcap * (2.0 / (1.0 + tl.exp(-2.0 * m / softcap)) - 1.0)
    total = tl.full([GP], 1.0, tl.float32)
    acc = tl.zeros([GP, DP], tl.float32) + v_new.to(tl.float32)[None, :]
    first = 0
    if WINDOW:
        first = tl.maximum(0, n + 1 - window)
    for s in range(first // BN * BN, n, BN):
        t = s + tl.arange(0, BN)
        seen = t < n
        if WINDOW:
            seen = seen & (t >= first)
        page = tl.load(TABLES + b * W + t // BLOCK, mask=t < n, other=0).to(tl.int64)
        at = ((page * BLOCK + t % BLOCK) * HK + h) * D
        k = tl.load(KC + at[:, None] + d[None, :], mask=seen[:, None] & real_d[None, :], other=0.0)
        x = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if CAP:
            x = softcap * (2.0 / (1.0 + tl.exp(-2.0 * x / softcap)) - 1.0)
        x = tl.where(seen[None, :], x, -1e30)
        new_m = tl.maximum(m, tl.max(x, 1))
        p = tl.exp(x - new_m[:, None])
        keep = tl.exp(m - new_m)
        v = tl.load(VC + at[:, None] + d[None, :], mask=seen[:, None] & real_d[None, :], other=0.0)
        acc = acc * keep[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        total = total * keep + tl.sum(p, 1)
        m = new_m
    out = (acc / total[:, None]).to(O.dtype.element_ty)
    tl.store(
        O + (b * HK * G + h * G + g)[:, None] * D + d[None, :],
        out,
        mask=(g < G)[:, None] & real_d[None, :],
    )


@torch.library.custom_op("reinforge::paged_decode", mutates_args=("keys", "values"))
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
) -> Tensor:
    """q [B, H, D] and new k, v [B, K, D] against the cache [blocks, BLOCK, K, D]; writes k and v
    there. window/softcap 0 = none.
    """
    rows, heads, size = q.shape
    kv_heads = keys.shape[2]
    block = keys.shape[1]
    groups = heads // kv_heads
    out = torch.empty(rows, heads, size, dtype=q.dtype, device=q.device)
    _paged_decode[(rows, kv_heads)](
        q,
        k,
        v,
        keys,
        values,
        out,
        tables,
        cached,
        scale,
        softcap,
        window,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        tables.stride(0),
        HK=kv_heads,
        G=groups,
        GP=max(16, triton.next_power_of_2(groups)),
        D=size,
        DP=max(16, triton.next_power_of_2(size)),
        BLOCK=block,
        CAP=softcap > 0,
        WINDOW=window > 0,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_stages=2,
        **_decode_tile(rows * kv_heads, size),
    )
    return out


def _decode_tile(programs: int, size: int) -> dict[str, int]:
    """Keys per step and warps, as measured on an H200: few programs take large steps, many take
    small ones.
    """
    if programs < 264:  # two for each of its multiprocessors
        return {"BN": 128, "num_warps": 4}
    return {"BN": 64 if size <= 64 else 32, "num_warps": 2}


@paged_decode.register_fake
def _(q, k, v, keys, values, tables, cached, scale, window, softcap):  # type: ignore[no-untyped-def]
    return torch.empty_like(q, memory_format=torch.contiguous_format)


@triton.jit
def _mix(x):
    """splitmix64's finaliser on unsigned integers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _draw(
    LOGITS,
    TEMPERATURES,
    SEEDS,
    POSITIONS,
    TOKENS,
    LOGPROBS,
    stride,
    V,
    scale,
    softcap,
    CAP: tl.constexpr,
    BV: tl.constexpr,
):
    """One program per row, two passes: the log-sum-exp (and the argmax, for greedy rows), then the
    crossing of u in the CDF.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(TEMPERATURES + row)
    greedy = temperature == 0.0
    inverse = 1.0 / tl.where(greedy, 1.0, temperature)
    top = -float("inf")
    total = 0.0
    best = 0
    for start in range(0, V, BV):
        at = start + tl.arange(0, BV)
        x = (
            tl.load(LOGITS + row * stride + at, mask=at < V, other=-float("inf")).to(tl.float32)
            * scale
        )
        if CAP:
            x = tl.where(
                at < V, softcap * (2.0 / (1.0 + tl.exp(-2.0 * x / softcap)) - 1.0), -float("inf")
            )
        x = x * inverse
        peak = tl.max(x, 0)
        if peak > top:
            best = start + tl.argmax(x, 0)
            total = total * tl.exp(top - peak)
            top = peak
        total += tl.sum(tl.exp(x - top), 0)
    seed = tl.load(SEEDS + row).to(tl.uint64)
    position = (tl.load(POSITIONS + row) + 1).to(tl.uint64)
    bits = _mix(seed + position * 0x9E3779B97F4A7C15) >> 40
    target = (bits.to(tl.float32) + 0.5) * (1.0 / 16777216.0) * total
    before = 0.0
    start = 0
    picked = -1
    while (start < V) & (picked < 0):
        at = start + tl.arange(0, BV)
        x = (
            tl.load(LOGITS + row * stride + at, mask=at < V, other=-float("inf")).to(tl.float32)
            * scale
        )
        if CAP:
            x = tl.where(
                at < V, softcap * (2.0 / (1.0 + tl.exp(-2.0 * x / softcap)) - 1.0), -float("inf")
            )
        p = tl.exp(x * inverse - top)
        mass = tl.sum(p, 0)
        if before + mass > target:
            cdf = before + tl.cumsum(p, 0)
            index = tl.min(tl.where((cdf > target) & (p > 0), tl.arange(0, BV), BV), 0)
            picked = tl.where(index < BV, start + index, -1)
        before += mass
        start += BV
    picked = tl.where(greedy | (picked < 0), best, picked)
    x = tl.load(LOGITS + row * stride + picked).to(tl.float32) * scale
    if CAP:
        x = softcap * (2.0 / (1.0 + tl.exp(-2.0 * x / softcap)) - 1.0)
    tl.store(TOKENS + row, picked.to(tl.int64))
    tl.store(LOGPROBS + row, x * inverse - top - tl.log(total))


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
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _draw[(rows,)](
        logits,
        temperatures,
        seeds,
        positions,
        tokens,
        logprobs,
        logits.stride(0),
        vocabulary,
        scale,
        softcap or 0.0,
        CAP=softcap is not None,
        BV=min(4096, triton.next_power_of_2(vocabulary)),
        num_warps=8,
    )
    return tokens, logprobs


@triton.jit
def _capped(x, softcap, CAP: tl.constexpr):
    """softcap·tanh(x / softcap), where there is a cap."""
    if CAP:
        x = softcap * (2.0 / (1.0 + tl.exp(-2.0 * x / softcap)) - 1.0)
    return x


@triton.jit
def _statistics(
    X,
    TARGETS,
    LOGP,
    LSE,
    ENTROPY,
    INVERSE,
    V,
    scale,
    softcap,
    CAP: tl.constexpr,
    WITH: tl.constexpr,
    BV: tl.constexpr,
):
    """One program per row, one pass: running maximum, Σ exp and Σ exp·z."""
    row = tl.program_id(0).to(tl.int64)
    inverse = tl.load(INVERSE + row)
    top = -float("inf")
    total = 0.0
    weighted = 0.0
    for start in range(0, V, BV):
        at = start + tl.arange(0, BV)
        z = (
            _capped(
                tl.load(X + row * V + at, mask=at < V, other=0.0).to(tl.float32) * scale,
                softcap,
                CAP,
            )
            * inverse
        )
        z = tl.where(at < V, z, -float("inf"))
        new_top = tl.maximum(top, tl.max(z, 0))
        keep = tl.exp(top - new_top)
        e = tl.exp(z - new_top)
        total = total * keep + tl.sum(e, 0)
        if WITH:
            weighted = weighted * keep + tl.sum(tl.where(e > 0, e * z, 0.0), 0)
        top = new_top
    lse = top + tl.log(total)
    chosen = (
        _capped(tl.load(X + row * V + tl.load(TARGETS + row)).to(tl.float32) * scale, softcap, CAP)
        * inverse
    )
    tl.store(LOGP + row, chosen - lse)
    tl.store(LSE + row, lse)
    if WITH:
        tl.store(ENTROPY + row, lse - weighted / total)


def softmax_statistics(
    x: Tensor,
    targets: Tensor,
    temperature: float | Tensor,
    scale: float,
    softcap: float | None,
    entropy: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Twin of `head.statistics`.

    No fused multiply-adds: the log-prob must not depend on whether the entropy is computed too.
    """
    rows, vocabulary = x.shape
    inverse = (
        1.0 / temperature
        if isinstance(temperature, Tensor)
        else torch.full((rows,), 1.0 / temperature, device=x.device)
    )
    logp, lse, ent = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(3))
    _statistics[(rows,)](
        x,
        targets,
        logp,
        lse,
        ent,
        inverse,
        vocabulary,
        scale,
        softcap or 0.0,
        CAP=softcap is not None,
        WITH=entropy,
        BV=8192,
        num_warps=16,
        enable_fp_fusion=False,
    )
    return logp, lse, ent if entropy else None


@triton.jit
def _gradient(
    X,
    TARGETS,
    LSE,
    G,
    ENTROPY,
    E,
    V,
    scale,
    inverse,
    softcap,
    CAP: tl.constexpr,
    WITH: tl.constexpr,
    BV: tl.constexpr,
):
    """One program per (row, block of the vocabulary); replaces the logits by their gradient."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BV + tl.arange(0, BV)
    capped = _capped(
        tl.load(X + row * V + at, mask=at < V, other=0.0).to(tl.float32) * scale, softcap, CAP
    )
    g = tl.load(G + row)
    logp = capped * inverse - tl.load(LSE + row)
    p = tl.exp(logp)
    grad = tl.where(at == tl.load(TARGETS + row), g, 0.0) - g * p
    if WITH:
        grad -= tl.load(E + row) * tl.where(p > 0, p * (logp + tl.load(ENTROPY + row)), 0.0)
    if CAP:
        grad *= 1.0 - (capped / softcap) * (capped / softcap)
    tl.store(X + row * V + at, (grad * scale * inverse).to(X.dtype.element_ty), mask=at < V)


def softmax_gradient(
    x: Tensor,
    targets: Tensor,
    lse: Tensor,
    g: Tensor,
    temperature: float,
    scale: float,
    softcap: float | None,
    entropy: Tensor | None,
    e: Tensor | None,
) -> Tensor:
    """Twin of `head.gradient`, in place."""
    rows, vocabulary = x.shape
    block = 4096
    _gradient[(rows, triton.cdiv(vocabulary, block))](
        x,
        targets,
        lse,
        g.contiguous(),
        lse if entropy is None else entropy,
        g if e is None else e.contiguous(),
        vocabulary,
        scale,
        1.0 / temperature,
        softcap or 0.0,
        CAP=softcap is not None,
        WITH=e is not None,
        BV=block,
        num_warps=8,
    )
    return x
