# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of `model.exact`.

What a program computes for a row depends on that row and on constants of the model alone: the
shapes of tiles, the number of warps and the order of every sum are the same for one row and for a
million.

Legend: M rows, N outputs, K inputs (of a matrix product) or key/value heads (of attention), G query
heads per key head, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from reinforge.models import exact_tiles
from reinforge.models.attention_rule import AttentionRule
from reinforge.models.kernels.common import capped, early, lines, next_power, page_of
from reinforge.models.kernels.paged_attention import NOTHING, room_for_parts, turned


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
        block = min(4096, next_power(x.shape[1]))
        _row_sum[(x.shape[0],)](
            x,
            y,
            x.shape[1],
            x.shape[1],
            BLOCK=block,
            num_warps=8 if block > 1024 else 4 if block > 256 else 1,
        )
    return y


@triton.jit
def _attend_tile(
    q,
    m,
    total,
    acc,
    at,
    K,
    V,
    TABLE,
    key_base,
    h,
    s,
    high,
    scale,
    softcap,
    window,
    k_n,
    k_h,
    v_n,
    v_h,
    d,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
    BN: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGED: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The next tile of keys, from s on; not MASKED: all of them are there, and all queries see
    them.
    """
    t = s + tl.arange(0, BN)
    there = t < high
    if PAGED:
        page = page_of(TABLE, t, s, high, BLOCK, BN, MASKED)
        line = page * BLOCK + t % BLOCK
    else:
        line = key_base + t
    k = lines(K, line * k_n + h * k_h, d, there, D, DP, MASKED)
    x = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    x = capped(x, softcap, CAP)
    seen = t[None, :] <= at[:, None]
    if MASKED:
        if WINDOW:
            seen = seen & (t[None, :] > at[:, None] - window)
        x = tl.where(seen, x, NOTHING)
    new_m = tl.maximum(m, tl.max(x, 1))
    p = tl.exp(x - new_m[:, None])
    if MASKED:
        p = tl.where(seen, p, 0.0)
    keep = tl.exp(m - new_m)
    total = total * keep + tl.sum(p, 1)
    if PAGED:  # values lie as keys do
        v = lines(V, line * k_n + h * k_h, d, there, D, DP, MASKED)
    else:
        v = lines(V, line * v_n + h * v_h, d, there, D, DP, MASKED)
    acc = tl.dot(p.to(v.dtype), v, acc * keep[:, None], input_precision=PRECISION)
    return new_m, total, acc


@triton.jit
def _attend_chunk(
    q,
    at,
    K,
    V,
    TABLE,
    key_base,
    h,
    begin,
    end,
    high,
    scale,
    softcap,
    window,
    k_n,
    k_h,
    v_n,
    v_h,
    d,
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
    """Online softmax of queries q at positions `at` over keys [begin, end) of a chunk. All queries
    see whole tiles of them, but for a window: only the last tile has to be masked.
    """
    m = tl.full([BM], NOTHING, tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DP], tl.float32)
    if WINDOW:
        for s in range(begin, end, BN):
            m, total, acc = _attend_tile(
                q, m, total, acc, at, K, V, TABLE, key_base, h, s, high, scale, softcap, window,
                k_n, k_h, v_n, v_h, d, D, DP, BLOCK, BN, CAP, WINDOW, PAGED, True, PRECISION,
            )  # fmt: skip
    else:
        whole = begin + tl.maximum(end - begin, 0) // BN * BN
        for s in range(begin, whole, BN):
            m, total, acc = _attend_tile(
                q, m, total, acc, at, K, V, TABLE, key_base, h, s, high, scale, softcap, window,
                k_n, k_h, v_n, v_h, d, D, DP, BLOCK, BN, CAP, WINDOW, PAGED, False, PRECISION,
            )  # fmt: skip
        if whole < end:
            m, total, acc = _attend_tile(
                q, m, total, acc, at, K, V, TABLE, key_base, h, whole, high, scale, softcap, window,
                k_n, k_h, v_n, v_h, d, D, DP, BLOCK, BN, CAP, WINDOW, PAGED, True, PRECISION,
            )  # fmt: skip
    return m, total, acc


@triton.jit
def _joined(top, total, acc, m, more, values):
    """What was found of the chunks so far (largest scores, sums, weighted values), and of the next
    one, as one.
    """
    new = tl.maximum(top, m)
    keep = tl.exp(top - new)
    share = tl.exp(m - new)
    return new, total * keep + more * share, acc * keep[:, None] + values * share[:, None]


@triton.jit(do_not_specialize=["P", "window"])
def _attend(
    Q,
    K,
    V,
    O,
    S_TOP,
    S_SUM,
    S_ACC,
    TABLES,
    KN,
    VN,
    COS,
    SIN,
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
    kn_n,
    kn_h,
    vn_n,
    vn_h,
    cos_n,
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
    NEW: tl.constexpr,
    SPLIT: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per (tile of queries, key head), or per chunk of its keys too (SPLIT), which
    `_join_chunks` joins then.

    PAGED, which is a decode step, changes where keys are looked up, and a tile is one position;
    else see `exact_tiles.TilePlan`. NEW: queries
    are turned first, and so is the key of their position, which is written to the cache with its
    value.
    """
    tile = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    first = tl.load(FIRST + tile).to(tl.int32)
    begin = 0
    if WINDOW:
        begin = tl.maximum(0, first + 1 - window) // BN * BN
    chunk = begin // CHUNK
    last = first // CHUNK
    if SPLIT:
        chunk = tl.program_id(2)
        if (chunk < begin // CHUNK) | (chunk > last):
            return
    r = tl.arange(0, BM)
    g = r % G
    at = first + r // G
    if PAGED:
        high = first + 1
        real = r < G
        row = tile + tl.zeros([BM], tl.int64)
    else:
        high = tl.load(HIGH + tile)
        real = (r // G < P) & (at >= tl.load(LOW + tile)) & (at < high)
        row = (tl.load(BASE + tile) + at).to(tl.int64)
    d = tl.arange(0, DP)
    real_d = d < D
    q_at = row[:, None] * q_n + (h * G + g)[:, None] * q_h
    q_there = real[:, None] & real_d[None, :]
    if NEW:
        cos = tl.load(COS + first * cos_n + d, mask=real_d, other=0.0)
        sin = tl.load(SIN + first * cos_n + d, mask=real_d, other=0.0)
        q = turned(Q, q_at, d[None, :], cos[None, :], sin[None, :], q_there, D)
        k_new = turned(KN, tile * kn_n + h * kn_h, d, cos, sin, real_d, D)
        v_new = tl.load(VN + tile * vn_n + h * vn_h + d, mask=real_d, other=0.0)
        slot = tl.load(TABLES + tile * W + first // BLOCK).to(tl.int64) * BLOCK + first % BLOCK
        own = real_d
        if SPLIT:
            own = real_d & (chunk == last)
        tl.store(K + slot * k_n + h * k_h + d, k_new, mask=own)
        tl.store(V + slot * v_n + h * v_h + d, v_new, mask=own)
        tl.debug_barrier()  # other threads of this program read them
    else:
        q = tl.load(Q + q_at + d[None, :], mask=q_there, other=0.0)
    key_base = tile
    if not PAGED:
        key_base = tl.load(KEYS + tile).to(tl.int64)
    low = tl.maximum(begin, chunk * CHUNK)
    stop = tl.minimum(first + 1, (chunk + 1) * CHUNK)
    top, total, acc = _attend_chunk(
        q, at, K, V, TABLES + tile * W, key_base, h, low, stop, high, scale, softcap, window,
        k_n, k_h, v_n, v_h, d, D, DP, BLOCK, BM, BN, CAP, WINDOW, PAGED, PRECISION,
    )  # fmt: skip
    if not SPLIT:
        for c in range(chunk + 1, last + 1):
            stop = tl.minimum(first + 1, (c + 1) * CHUNK)
            m, more, values = _attend_chunk(
                q, at, K, V, TABLES + tile * W, key_base, h, c * CHUNK, stop, high, scale, softcap,
                window, k_n, k_h, v_n, v_h, d, D, DP, BLOCK, BM, BN, CAP, WINDOW, PAGED, PRECISION,
            )  # fmt: skip
            top, total, acc = _joined(top, total, acc, m, more, values)
    if SPLIT:
        at_line = (tile * tl.num_programs(2) + chunk) * H + h * G + g
        tl.store(S_TOP + at_line, top, mask=real)
        tl.store(S_SUM + at_line, total, mask=real)
        tl.store(S_ACC + at_line[:, None] * D + d[None, :], acc, mask=q_there)
    else:
        out = (acc / total[:, None]).to(O.dtype.element_ty)
        o_at = row[:, None] * (H * D) + (h * G + g)[:, None] * D
        tl.store(O + o_at + d[None, :], out, mask=q_there)


@triton.jit
def _join_chunks(
    S_TOP,
    S_SUM,
    S_ACC,
    O,
    FIRST,
    window,
    chunks,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per (sequence, key head): its chunks, in order."""
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    first = tl.load(FIRST + b).to(tl.int32)
    begin = 0
    if WINDOW:
        begin = tl.maximum(0, first + 1 - window) // BN * BN
    g = tl.arange(0, BM)
    d = tl.arange(0, DP)
    there = (g < G)[:, None] & (d < D)[None, :]
    top = tl.full([BM], NOTHING, tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DP], tl.float32)
    for c in range(begin // CHUNK, first // CHUNK + 1):
        line = (b * chunks + c) * H + h * G + g
        m = tl.load(S_TOP + line, mask=g < G, other=0.0)
        more = tl.load(S_SUM + line, mask=g < G, other=0.0)
        values = tl.load(S_ACC + line[:, None] * D + d[None, :], mask=there, other=0.0)
        top, total, acc = _joined(top, total, acc, m, more, values)
    out = (acc / total[:, None]).to(O.dtype.element_ty)
    tl.store(O + (b * H + h * G + g)[:, None] * D + d[None, :], out, mask=there)


@dataclass(slots=True)
class NewKeys:
    """Key and value of one new token per sequence, [B, K, D] each, and cos and sin [positions, D]
    by which queries and keys are turned.
    """

    keys: Tensor
    values: Tensor
    cos: Tensor
    sin: Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: exact_tiles.TilePlan,
    tables: Tensor | None,
    block: int,
    rule: AttentionRule,
    new: NewKeys | None = None,
    parts: int = 1,
) -> Tensor:
    """Twin of `exact_attention.attend`. In a decode step: `new` is what is to be turned and written
    to the cache first, and chunks of keys have programs of their own where there are several
    `parts`, at least as many as any sequence has chunks.

    No fused multiply-adds: whether the compiler may fuse must not depend on the code around an
    operation, which differs between the two ways of finding keys.
    """
    groups = q.shape[1] // k.shape[1]
    rows = exact_tiles.tile_shape(groups, True)[0]
    one = plan.positions == 1 and tables is not None
    if one and q.shape[2] <= NARROW and few_rows_agree(groups, q):
        rows = few_rows(groups)
    return _launch(q, k, v, plan, tables, block, rule, rows, new, parts)


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: exact_tiles.TilePlan,
    tables: Tensor | None,
    block: int,
    rule: AttentionRule,
    rows: int,
    new: NewKeys | None = None,
    parts: int = 1,
) -> Tensor:
    """`attend` with tiles of so many rows."""
    window = rule.window or 0
    softcap = rule.softcap or 0.0
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    heads = q.shape[1]
    size = q.shape[2]
    kv_heads = k.shape[1]
    groups = heads // kv_heads
    padded = max(16, next_power(size))
    out = torch.empty(q.shape[0], heads, size, dtype=q.dtype, device=q.device)
    if not len(plan.first):
        return out
    assert tables is None or k.stride() == v.stride()
    added = new or NewKeys(k, v, q, q)
    found = (out, out, out)
    if parts > 1:
        assert plan.positions == 1
        found = room_for_parts(len(plan.first), parts, heads, size, q.device)
    shared = {"H": heads, "G": groups, "D": size, "DP": padded, "BM": rows}
    shared |= {"BN": exact_tiles.KEYS, "CHUNK": exact_tiles.CHUNK, "WINDOW": window > 0}
    _attend[(len(plan.first), kv_heads, parts)](
        q,
        k,
        v,
        out,
        *found,
        plan.first if tables is None else tables,
        added.keys,
        added.values,
        added.cos,
        added.sin,
        plan.first,
        plan.base,
        plan.low,
        plan.high,
        plan.keys,
        rule.scale,
        softcap,
        window,
        plan.positions,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        *added.keys.stride()[:2],
        *added.values.stride()[:2],
        added.cos.stride(0),
        0 if tables is None else tables.stride(0),
        BLOCK=block,
        CAP=softcap > 0,
        PAGED=tables is not None,
        NEW=new is not None,
        SPLIT=parts > 1,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=min(4, rows // 16),
        num_stages=stages_of(padded * q.element_size()),
        enable_fp_fusion=False,
        **shared,
        **early(),
    )
    if parts > 1:
        _join_chunks[(len(plan.first), kv_heads)](
            *found,
            out,
            plan.first,
            window,
            parts,
            num_warps=4,
            enable_fp_fusion=False,
            **shared,
            **early(),
        )
    return out


def stages_of(line: int) -> int:
    """Tiles of keys that are on their way at once, by the bytes of a key: what fits, as measured on
    an H200.
    """
    return 3 if line <= 128 else 2 if line <= 256 else 1


# ---- a decode step: a tile holds one position ----

# up to this head size one warp for few rows is faster than a warp group for many, most of them
# empty, as measured on an H200; a larger one has no room for the accumulators of a warp
NARROW = 64

_seen: dict[tuple[object, ...], bool] = {}  # what was tried on this machine


def few_rows(groups: int) -> int:
    """Rows of a tile for one position: what one warp multiplies at once, or more."""
    return max(16, next_power(groups))


def few_rows_agree(groups: int, q: Tensor) -> bool:
    """Whether tiles of few rows, which other instructions multiply, give the bits of large ones;
    tried once on sequences whose values nearly cancel each other.
    """
    size = q.shape[2]
    key = (groups, size, q.dtype, q.device)
    capturing = q.is_cuda and torch.cuda.is_current_stream_capturing()
    if key not in _seen and not capturing:
        with torch._C.DisableTorchFunction():
            large = exact_tiles.tile_shape(groups, True)[0]
            given = _examples(groups, size, q.dtype, q.device)
            rule = AttentionRule(size**-0.5)
            found = [_launch(*given, rule, n) for n in (large, few_rows(groups))]
            _seen[key] = torch.equal(*found)
    return _seen.get(key, False)


def _examples(
    groups: int, size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, exact_tiles.TilePlan, Tensor, int]:
    """Arguments of an attention of 48 sequences of up to 330 keys, over one key head."""
    generator = torch.Generator(device).manual_seed(0)
    blocks = 21

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    q = normal(48, groups, size)
    k, v = (normal(48 * blocks * 16, 1, size) for _ in range(2))
    tables = torch.arange(48 * blocks, device=device).view(48, blocks)
    cached = torch.arange(48, device=device) * 7
    return q, k, v, exact_tiles.plan_paged(cached), tables, 16
