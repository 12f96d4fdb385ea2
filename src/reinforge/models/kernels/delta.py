# mypy: disable-error-code="no-untyped-def"
"""The gated delta rule for training: outputs of whole segments, and gradients of all inputs.

Within a chunk of C tokens with keys k, values v, betas b and sums G of the decays' logarithms so
far, what the tokens write is one triangular system (2406.06484, 2412.06464):

    M = 1 + strictly lower part of (b_i k_i·k_j e^(G_i - G_j)),   w = M⁻¹ (b e^G k),   u = M⁻¹ (b v)
    new = u - w S,   o = e^G q S + lower part of (q_i·k_j e^(G_i - G_j)) new
    S  <- e^(G_C) S + (e^(G_C - G) k)' new

`_prepare` has all chunks at once, `_advance` takes the chunks of a segment one after the other.
The backward pass computes both again, then `_retreat` goes from the end of a segment to its
beginning, and `_inputs` has all chunks at once. Only e^(G_i - G_j) with i >= j is ever computed: a
number between 0 and 1, however strong decays are. Nothing is added up by atomic operations.

Tiles have 32 rows, so that no product becomes a `wgmma`: Triton 3.4 to 3.7 compile those of kernels
like these wrongly on a Hopper. States are held with values first for the same reason.

Legend: N tokens, H heads, D size of a key, V size of a value, C tokens of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from reinforge.models.kernels.common import ceil_div, next_power
from reinforge.models.segment_table import CHUNK as TOKENS
from reinforge.models.segment_table import SegmentTable

CHUNK = tl.constexpr(TOKENS)
# columns of a table of segments
COLUMNS = tl.constexpr(8)
BEGIN = tl.constexpr(0)
LENGTH = tl.constexpr(1)
FIRST = tl.constexpr(2)
FROM = tl.constexpr(3)
TO = tl.constexpr(4)
NEAR = tl.constexpr(5)
FAR = tl.constexpr(6)
FAR_END = tl.constexpr(7)


@triton.jit
def _doubled(inverse, system, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Of 1 + system, strictly lower triangular: from the inverse of its blocks of SIZE on the
    diagonal that of blocks twice as large.
    """
    i = tl.arange(0, CHUNK)
    pair = i // (2 * SIZE)
    block = i // SIZE
    below = (pair[:, None] == pair[None, :]) & (block[:, None] != block[None, :])
    part = tl.dot(inverse, tl.where(below, system, 0.0), input_precision=PRECISION)
    return inverse - tl.dot(part, inverse, input_precision=PRECISION)


@triton.jit
def _unit(x):
    """1 / |x| of each row, as transformers rounds it."""
    return tl.rsqrt(tl.sum(x * x, 1) + 1e-6)


@triton.jit
def _decays(g):
    """[C, C]: what is left of token j at token i, e^(g_j+1 + .. + g_i); 0 where i < j. Each sum is
    its own: a difference of sums would lose the digits of a small one after a strong decay.
    """
    i = tl.arange(0, CHUNK)
    later = i[:, None] > i[None, :]
    sums = tl.cumsum(tl.where(later, tl.broadcast_to(g[:, None], CHUNK, CHUNK), 0.0), 0)
    return tl.where(i[:, None] >= i[None, :], tl.exp(sums), 0.0)


@triton.jit
def _prepare(
    Q,
    K,
    VALUE,
    G,
    BETA,
    CHUNKS,
    QN,
    KN,
    GROWN,
    LEFT,
    WEIGHTS,
    INVERSE,
    W,
    U,
    H,
    q_t,
    q_h,
    k_t,
    k_h,
    v_t,
    v_h,
    g_t,
    g_h,
    b_t,
    b_h,
    scale,
    D: tl.constexpr,
    V: tl.constexpr,
    NORMED: tl.constexpr,
    PRECISION: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
):
    """One program per (chunk, head): queries and keys as they are used; what is left of the state
    before the chunk at each token (GROWN) and of each token after the chunk (LEFT); weights of the
    outputs, the inverse, w and u.
    """
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    begin = tl.load(CHUNKS + chunk * 2).to(tl.int64)
    count = tl.load(CHUNKS + chunk * 2 + 1)
    i = tl.arange(0, CHUNK)
    d = tl.arange(0, BD)
    there = i < count
    lines = there[:, None] & (d < D)[None, :]
    t = begin + i
    own = t * H + head  # of what is made here
    dtype = QN.dtype.element_ty
    q = tl.load(Q + t[:, None] * q_t + head * q_h + d[None, :], mask=lines, other=0.0)
    k = tl.load(K + t[:, None] * k_t + head * k_h + d[None, :], mask=lines, other=0.0)
    q = q.to(tl.float32)
    k = k.to(tl.float32)
    if NORMED:
        q = q * _unit(q)[:, None]
        k = k * _unit(k)[:, None]
    queries = (q * scale).to(dtype)
    keys = k.to(dtype)
    tl.store(QN + own[:, None] * D + d[None, :], queries, mask=lines)
    tl.store(KN + own[:, None] * D + d[None, :], keys, mask=lines)
    g = tl.load(G + t * g_t + head * g_h, mask=there, other=0.0).to(tl.float32)
    beta = tl.load(BETA + t * b_t + head * b_h, mask=there, other=0.0).to(tl.float32)
    grown = tl.exp(tl.sum(tl.where(i[:, None] >= i[None, :], g[None, :], 0.0), 1))
    left = tl.exp(tl.sum(tl.where(i[:, None] < i[None, :], g[None, :], 0.0), 1))
    tl.store(GROWN + own, grown, mask=there)
    tl.store(LEFT + own, left, mask=there)

    decays = _decays(g)
    turned = tl.trans(keys)
    weights = tl.dot(queries, turned, input_precision=PRECISION) * decays
    tl.store(WEIGHTS + own[:, None] * CHUNK + i[None, :], weights.to(dtype), mask=there[:, None])
    system = tl.dot(keys, turned, input_precision=PRECISION) * beta[:, None] * decays
    system = tl.where(i[:, None] > i[None, :], system, 0.0)
    pairs = (i[:, None] // 2) == (i[None, :] // 2)
    inverse = tl.where(i[:, None] == i[None, :], 1.0, tl.where(pairs, -system, 0.0))
    inverse = _doubled(inverse, system, 2, "tf32x3")
    inverse = _doubled(inverse, system, 4, "tf32x3")
    inverse = _doubled(inverse, system, 8, "tf32x3")
    inverse = _doubled(inverse, system, 16, "tf32x3").to(dtype)
    tl.store(INVERSE + own[:, None] * CHUNK + i[None, :], inverse, mask=there[:, None])
    reached = (keys.to(tl.float32) * (beta * grown)[:, None]).to(dtype)
    w = tl.dot(inverse, reached, input_precision=PRECISION)
    tl.store(W + own[:, None] * D + d[None, :], w.to(dtype), mask=lines)
    for start in range(0, V, BV):
        v = start + tl.arange(0, BV)
        part = there[:, None] & (v < V)[None, :]
        value = tl.load(VALUE + t[:, None] * v_t + head * v_h + v[None, :], mask=part, other=0.0)
        value = (value.to(tl.float32) * beta[:, None]).to(dtype)
        u = tl.dot(inverse, value, input_precision=PRECISION)
        tl.store(U + own[:, None] * V + v[None, :], u.to(dtype), mask=part)


@triton.jit(do_not_specialize=["wave"])
def _advance(
    QN,
    KN,
    W,
    U,
    GROWN,
    LEFT,
    WEIGHTS,
    TABLE,
    HELD,
    ENDS,
    OUT,
    STATES,
    NEW,
    wave,
    H,
    held_s,
    ends_s,
    D: tl.constexpr,
    V: tl.constexpr,
    OUTPUTS: tl.constexpr,
    HAS_ENDS: tl.constexpr,
    PRECISION: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
):
    """One program per (segment of the wave, head, piece of the values): outputs, or (for the
    backward pass) the state before each chunk and what each token writes; and the last state.
    """
    row = TABLE + (wave + tl.program_id(0)) * COLUMNS
    head = tl.program_id(1)
    begin = tl.load(row + BEGIN).to(tl.int64)
    end = begin + tl.load(row + LENGTH)
    chunk = tl.load(row + FIRST).to(tl.int64)
    source = tl.load(row + FROM).to(tl.int64)
    i = tl.arange(0, CHUNK)
    d = tl.arange(0, BD)
    v = tl.program_id(2) * BV + tl.arange(0, BV)
    matrix = (v < V)[:, None] & (d < D)[None, :]
    dtype = KN.dtype.element_ty
    at = head * D * V + d[None, :] * V + v[:, None]
    state = tl.load(HELD + source * held_s + at, mask=matrix & (source >= 0), other=0.0)
    state = state.to(tl.float32)
    for first in range(begin, end, CHUNK):
        t = first + i
        own = t * H + head
        there = t < end
        lines = there[:, None] & (d < D)[None, :]
        turned = (d < D)[:, None] & there[None, :]
        values = (v < V)[:, None] & there[None, :]
        w = tl.load(W + own[None, :] * D + d[:, None], mask=turned, other=0.0)
        k = tl.load(KN + own[:, None] * D + d[None, :], mask=lines, other=0.0)
        u = tl.load(U + own[None, :] * V + v[:, None], mask=values, other=0.0)
        left = tl.load(LEFT + own, mask=there, other=0.0)
        held = state.to(dtype)
        new = u.to(tl.float32) - tl.dot(held, w, input_precision=PRECISION)  # [BV, C]
        if OUTPUTS:
            q = tl.load(QN + own[None, :] * D + d[:, None], mask=turned, other=0.0)
            weights = tl.load(  # rows are keys
                WEIGHTS + own[None, :] * CHUNK + i[:, None], mask=there[None, :], other=0.0
            )
            grown = tl.load(GROWN + own, mask=there, other=0.0)
            out = tl.dot(held, q, input_precision=PRECISION) * grown[None, :]
            out += tl.dot(new.to(dtype), weights, input_precision=PRECISION)
            tl.store(OUT + own[None, :] * V + v[:, None], out.to(OUT.dtype.element_ty), mask=values)
        else:
            to = (chunk * H + head) * D * V + v[:, None] * D + d[None, :]
            tl.store(STATES + to, held, mask=matrix)
            tl.store(NEW + own[None, :] * V + v[:, None], new.to(dtype), mask=values)
            chunk += 1
        kept = tl.load(GROWN + (tl.minimum(first + CHUNK, end) - 1) * H + head)
        added = tl.dot((new * left[None, :]).to(dtype), k, input_precision=PRECISION)
        state = state * kept + added
    if HAS_ENDS:
        target = tl.load(row + TO).to(tl.int64)
        tl.store(ENDS + target * ends_s + at, state, mask=matrix & (target >= 0))


@triton.jit(do_not_specialize=["wave"])
def _retreat(
    QN,
    KN,
    W,
    GRAD,
    GROWN,
    LEFT,
    WEIGHTS,
    TABLE,
    FAR_GRAD,
    NEAR_GRAD,
    STATE_GRADS,
    NEW_GRAD,
    wave,
    H,
    o_t,
    o_h,
    far_s,
    near_s,
    D: tl.constexpr,
    V: tl.constexpr,
    PRECISION: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
):
    """One program per (segment of the wave, head, piece of the values): gradients of the state
    after each chunk, of what each token writes, and of the first state.
    """
    row = TABLE + (wave + tl.program_id(0)) * COLUMNS
    head = tl.program_id(1)
    begin = tl.load(row + BEGIN).to(tl.int64)
    length = tl.load(row + LENGTH)
    end = begin + length
    chunks = (length + CHUNK - 1) // CHUNK
    i = tl.arange(0, CHUNK)
    d = tl.arange(0, BD)
    v = tl.program_id(2) * BV + tl.arange(0, BV)
    matrix = (v < V)[:, None] & (d < D)[None, :]
    dtype = KN.dtype.element_ty
    at = head * D * V + d[None, :] * V + v[:, None]
    state = tl.zeros((BV, BD), tl.float32)
    sources = tl.load(row + FAR).to(tl.int64)
    sources_end = tl.load(row + FAR_END).to(tl.int64)
    for source in range(sources, sources_end):
        part = tl.load(FAR_GRAD + source * far_s + at, mask=matrix, other=0.0)
        state += part.to(tl.float32)
    chunk = tl.load(row + FIRST).to(tl.int64) + chunks
    for step in range(chunks):
        first = begin + (chunks - 1 - step) * CHUNK
        chunk -= 1
        t = first + i
        own = t * H + head
        there = t < end
        lines = there[:, None] & (d < D)[None, :]
        turned = (d < D)[:, None] & there[None, :]
        values = (v < V)[:, None] & there[None, :]
        k = tl.load(KN + own[None, :] * D + d[:, None], mask=turned, other=0.0)
        grad = tl.load(GRAD + t[None, :] * o_t + head * o_h + v[:, None], mask=values, other=0.0)
        weights = tl.load(  # rows are queries
            WEIGHTS + own[:, None] * CHUNK + i[None, :], mask=there[:, None], other=0.0
        )
        left = tl.load(LEFT + own, mask=there, other=0.0)
        held = state.to(dtype)
        to = (chunk * H + head) * D * V + v[:, None] * D + d[None, :]
        tl.store(STATE_GRADS + to, held, mask=matrix)
        new = tl.dot(held, k, input_precision=PRECISION) * left[None, :]
        new += tl.dot(grad.to(dtype), weights, input_precision=PRECISION)
        tl.store(NEW_GRAD + own[None, :] * V + v[:, None], new.to(dtype), mask=values)
        q = tl.load(QN + own[:, None] * D + d[None, :], mask=lines, other=0.0)
        w = tl.load(W + own[:, None] * D + d[None, :], mask=lines, other=0.0)
        grown = tl.load(GROWN + own, mask=there, other=0.0)
        kept = tl.load(GROWN + (tl.minimum(first + CHUNK, end) - 1) * H + head)
        reached = (grad.to(tl.float32) * grown[None, :]).to(dtype)
        state = state * kept + tl.dot(reached, q, input_precision=PRECISION)
        state -= tl.dot(new.to(dtype), w, input_precision=PRECISION)
    target = tl.load(row + NEAR).to(tl.int64)
    tl.store(NEAR_GRAD + target * near_s + at, state, mask=matrix & (target >= 0))


@triton.jit
def _through_norm(grad, x):
    """The gradient of x from that of x / |x|."""
    unit = _unit(x)[:, None]
    line = x * unit
    return unit * (grad - line * tl.sum(line * grad, 1)[:, None])


@triton.jit
def _inputs(
    Q,
    K,
    VALUE,
    G,
    BETA,
    CHUNKS,
    QN,
    KN,
    GROWN,
    LEFT,
    WEIGHTS,
    INVERSE,
    GRAD,
    NEW,
    NEW_GRAD,
    STATES,
    STATE_GRADS,
    Q_GRAD,
    K_GRAD,
    V_GRAD,
    G_GRAD,
    BETA_GRAD,
    H,
    q_t,
    q_h,
    k_t,
    k_h,
    v_t,
    v_h,
    g_t,
    g_h,
    b_t,
    b_h,
    o_t,
    o_h,
    to_t,
    scale,
    D: tl.constexpr,
    V: tl.constexpr,
    NORMED: tl.constexpr,
    PRECISION: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
):
    """One program per (chunk, head): gradients of the five inputs. Those of the values' pieces are
    added up in loops, one after the other; three loops, so that only one large sum is in registers
    at a time. `to_t`: heads of a token in what is written.
    """
    chunk = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    begin = tl.load(CHUNKS + chunk * 2).to(tl.int64)
    count = tl.load(CHUNKS + chunk * 2 + 1)
    i = tl.arange(0, CHUNK)
    d = tl.arange(0, BD)
    there = i < count
    lines = there[:, None] & (d < D)[None, :]
    below = i[:, None] > i[None, :]
    t = begin + i
    own = t * H + head
    to = t * to_t + head
    states = (chunk * H + head) * D * V
    dtype = KN.dtype.element_ty
    g = tl.load(G + t * g_t + head * g_h, mask=there, other=0.0).to(tl.float32)
    beta = tl.load(BETA + t * b_t + head * b_h, mask=there, other=0.0).to(tl.float32)
    grown = tl.load(GROWN + own, mask=there, other=0.0)
    decays = _decays(g)

    # queries. The gradient of a decay is what goes from places before it to its own and to later
    # ones (`later`, `pull`, `earlier`): sums of such terms alone, so that nothing cancels
    grads = tl.zeros((CHUNK, BD), tl.float32)
    weight_grad = tl.zeros((CHUNK, CHUNK), tl.float32)
    for start in tl.range(0, V, BV, loop_unroll_factor=1):
        v = start + tl.arange(0, BV)
        part = there[:, None] & (v < V)[None, :]
        matrix = (v < V)[:, None] & (d < D)[None, :]
        grad = tl.load(GRAD + t[:, None] * o_t + head * o_h + v[None, :], mask=part, other=0.0)
        new = tl.load(NEW + own[:, None] * V + v[None, :], mask=part, other=0.0)
        state = tl.load(STATES + states + v[:, None] * D + d[None, :], mask=matrix, other=0.0)
        weight_grad += tl.dot(grad.to(dtype), tl.trans(new), input_precision=PRECISION)
        grads += tl.dot(grad.to(dtype), state, input_precision=PRECISION)
    grads = grads * grown[:, None]
    weights = tl.load(WEIGHTS + own[:, None] * CHUNK + i[None, :], mask=there[:, None], other=0.0)
    pull = tl.where(below, weight_grad * weights.to(tl.float32), 0.0)
    weight_low = (weight_grad * decays).to(dtype)
    queries = tl.load(QN + own[:, None] * D + d[None, :], mask=lines, other=0.0)
    keys = tl.load(KN + own[:, None] * D + d[None, :], mask=lines, other=0.0)
    later = tl.sum(grads * queries.to(tl.float32), 1)
    grads = (grads + tl.dot(weight_low, keys, input_precision=PRECISION)) * scale
    target = to[:, None] * D + d[None, :]
    if NORMED:
        q = tl.load(Q + t[:, None] * q_t + head * q_h + d[None, :], mask=lines, other=0.0)
        grads = _through_norm(grads, q.to(tl.float32))
    tl.store(Q_GRAD + target, grads.to(Q_GRAD.dtype.element_ty), mask=lines)

    # keys, through the outputs and the state after the chunk
    left = tl.load(LEFT + own, mask=there, other=0.0)
    grads = tl.zeros((CHUNK, BD), tl.float32)
    both = tl.zeros((BD,), tl.float32)
    for start in tl.range(0, V, BV, loop_unroll_factor=1):
        v = start + tl.arange(0, BV)
        part = there[:, None] & (v < V)[None, :]
        matrix = (v < V)[:, None] & (d < D)[None, :]
        new = tl.load(NEW + own[:, None] * V + v[None, :], mask=part, other=0.0)
        at = states + v[:, None] * D + d[None, :]
        state_grad = tl.load(STATE_GRADS + at, mask=matrix, other=0.0)
        state = tl.load(STATES + at, mask=matrix, other=0.0)
        grads += tl.dot(new, state_grad, input_precision=PRECISION)
        both += tl.sum(state.to(tl.float32) * state_grad.to(tl.float32), 0)
    grads = grads * left[:, None]
    earlier = tl.sum(grads * keys.to(tl.float32), 1)
    grads += tl.dot(tl.trans(weight_low), queries, input_precision=PRECISION)

    # values, and what w and u are made of
    turned = tl.load(  # the inverse with rows and columns changed
        INVERSE + own[None, :] * CHUNK + i[:, None], mask=there[None, :], other=0.0
    )
    w_grad = tl.zeros((CHUNK, BD), tl.float32)
    inverse_grad = tl.zeros((CHUNK, CHUNK), tl.float32)
    beta_grad = tl.zeros((CHUNK,), tl.float32)
    for start in tl.range(0, V, BV, loop_unroll_factor=1):
        v = start + tl.arange(0, BV)
        part = there[:, None] & (v < V)[None, :]
        matrix = (v < V)[:, None] & (d < D)[None, :]
        new_grad = tl.load(NEW_GRAD + own[:, None] * V + v[None, :], mask=part, other=0.0)
        value = tl.load(VALUE + t[:, None] * v_t + head * v_h + v[None, :], mask=part, other=0.0)
        value = value.to(tl.float32)
        state = tl.load(STATES + states + v[:, None] * D + d[None, :], mask=matrix, other=0.0)
        w_grad -= tl.dot(new_grad, state, input_precision=PRECISION)
        scaled = (value * beta[:, None]).to(dtype)
        inverse_grad += tl.dot(new_grad, tl.trans(scaled), input_precision=PRECISION)
        scaled_grad = tl.dot(turned, new_grad, input_precision=PRECISION)
        beta_grad += tl.sum(scaled_grad * value, 1)
        v_grad = (scaled_grad * beta[:, None]).to(V_GRAD.dtype.element_ty)
        tl.store(V_GRAD + to[:, None] * V + v[None, :], v_grad, mask=part)
    w_low = w_grad.to(dtype)
    # loaded again rather than held in registers
    keys = tl.load(KN + own[:, None] * D + d[None, :], mask=lines, other=0.0)
    reached = (keys.to(tl.float32) * (beta * grown)[:, None]).to(dtype)
    inverse_grad += tl.dot(w_low, tl.trans(reached), input_precision=PRECISION)
    reached_grad = tl.dot(turned, w_low, input_precision=PRECISION)
    grads += reached_grad * (beta * grown)[:, None]
    along = tl.sum(reached_grad * keys.to(tl.float32), 1) * grown
    beta_grad += along
    later += along * beta

    # keys, through the inverse: the gradient of M is -(M⁻¹)' dM⁻¹ (M⁻¹)'
    part_grad = tl.dot(inverse_grad.to(dtype), turned, input_precision=PRECISION).to(dtype)
    system_grad = -tl.dot(turned, part_grad, input_precision=PRECISION)
    system_grad = tl.where(below, system_grad * decays, 0.0)
    alike = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
    beta_grad += tl.sum(system_grad * alike, 1)
    system_grad = system_grad * beta[:, None]
    pull += system_grad * alike
    system_low = system_grad.to(dtype)
    grads += tl.dot(system_low + tl.trans(system_low), keys, input_precision=PRECISION)
    if NORMED:
        k = tl.load(K + t[:, None] * k_t + head * k_h + d[None, :], mask=lines, other=0.0)
        grads = _through_norm(grads, k.to(tl.float32))
    tl.store(K_GRAD + target, grads.to(K_GRAD.dtype.element_ty), mask=lines)

    before = tl.where(i[:, None] < i[None, :], 1.0, 0.0)
    passed = tl.dot(
        pull.to(dtype), before.to(dtype), input_precision=PRECISION
    )  # [C, C]: over the decay of a column
    g_grad = tl.sum(tl.where(i[:, None] >= i[None, :], passed + later[:, None], 0.0), 0)
    g_grad += tl.sum(tl.where(i[:, None] < i[None, :], earlier[:, None], 0.0), 0)
    g_grad += tl.sum(both) * tl.load(GROWN + (begin + count - 1) * H + head)
    tl.store(G_GRAD + to, g_grad.to(G_GRAD.dtype.element_ty), mask=there)
    tl.store(BETA_GRAD + to, beta_grad.to(BETA_GRAD.dtype.element_ty), mask=there)


@dataclass(frozen=True, slots=True)
class _ChunkStates:
    """What `_prepare` makes of the inputs."""

    queries: Tensor  # [N, H, D] with norm and scale
    keys: Tensor  # [N, H, D]
    grown: Tensor  # [N, H] what is left of the state before the chunk
    left: Tensor  # [N, H] what is left of a token after its chunk
    weights: Tensor  # [N, H, C] of what tokens write in outputs
    inverse: Tensor  # [N, H, C]
    w: Tensor  # [N, H, D]
    u: Tensor  # [N, H, V]


def tiles_of(query: Tensor, value: Tensor) -> dict[str, Any]:
    """Constants of every launch."""
    size, wide = query.shape[-1], value.shape[-1]
    return {
        "D": size,
        "V": wide,
        "PRECISION": "tf32x3" if query.dtype == torch.float32 else "ieee",
        "BD": max(16, next_power(size)),
        "BV": min(32, max(16, next_power(wide))),
        "num_warps": 4,
    }


def _pieces(value: Tensor, tiles: dict[str, Any]) -> int:
    return int(ceil_div(value.shape[-1], tiles["BV"]))


def _line_strides(*parts: Tensor) -> list[int]:
    """Of tokens and heads; numbers of one head lie side by side."""
    return [stride for x in parts for stride in x.stride()[:2]]


def _prepared(
    parts: tuple[Tensor, ...], table: SegmentTable, normed: bool, tiles: dict[str, Any]
) -> _ChunkStates:
    query, key, value, decay, beta = parts
    tokens, heads, size = query.shape
    made = _ChunkStates(
        queries=query.new_empty(tokens, heads, size),
        keys=query.new_empty(tokens, heads, size),
        grown=query.new_empty(tokens, heads, dtype=torch.float32),
        left=query.new_empty(tokens, heads, dtype=torch.float32),
        weights=query.new_empty(tokens, heads, TOKENS),
        inverse=query.new_empty(tokens, heads, TOKENS),
        w=query.new_empty(tokens, heads, size),
        u=query.new_empty(tokens, heads, value.shape[-1]),
    )
    _prepare[(len(table.chunks), heads)](
        query,
        key,
        value,
        decay,
        beta,
        table.chunks,
        made.queries,
        made.keys,
        made.grown,
        made.left,
        made.weights,
        made.inverse,
        made.w,
        made.u,
        heads,
        *_line_strides(*parts),
        size**-0.5,
        NORMED=normed,
        num_stages=2,
        **tiles,
    )
    return made


def _advanced(
    made: _ChunkStates,
    table: SegmentTable,
    held: Tensor | None,
    ends: Tensor | None,
    out: Tensor | None,
    states: Tensor | None,
    new: Tensor | None,
    tiles: dict[str, Any],
) -> None:
    """Segments begin with states of `held`, or of the `ends` of the wave before; None: as said by
    the table, nobody begins with one.
    """
    heads = made.keys.shape[1]
    nothing = made.grown
    begun = ends if held is None else held
    for first, count in table.waves:
        _advance[(count, heads, _pieces(made.u, tiles))](
            made.queries,
            made.keys,
            made.w,
            made.u,
            made.grown,
            made.left,
            made.weights,
            table.segments,
            nothing if begun is None else begun,
            nothing if ends is None else ends,
            nothing if out is None else out,
            nothing if states is None else states,
            nothing if new is None else new,
            first,
            heads,
            0 if begun is None else begun.stride(0),
            0 if ends is None else ends.stride(0),
            OUTPUTS=out is not None,
            HAS_ENDS=ends is not None,
            num_stages=2,
            **tiles,
        )


def forward(
    parts: tuple[Tensor, ...],
    table: SegmentTable,
    held: Tensor | None,
    ends: Tensor | None,
    normed: bool,
) -> Tensor:
    """Query and key [N, H, D], value [N, H, V], decay and beta [N, H] -> [N, H, V]; last states go
    into `ends` [.., H, D, V].
    """
    query, _, value, *_ = parts
    tiles = tiles_of(query, value)
    made = _prepared(parts, table, normed, tiles)
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    _advanced(made, table, held, ends, out, None, None, tiles)
    return out


def backward(
    parts: tuple[Tensor, ...],
    table: SegmentTable,
    held: Tensor | None,
    ends: Tensor | None,
    grad: Tensor,
    far: Tensor | None,
    near: Tensor | None,
    grads: tuple[Tensor, ...],
    normed: bool,
) -> None:
    """Gradients of the parts go into `grads`, and those of first states into `near` [.., H, D, V];
    `far`: those of last states, None: what `near` gets from the wave before. `ends`: room for last
    states, where a wave begins with them. All may be some heads of larger tensors.
    """
    query, key, value, decay, beta = parts
    heads, size = query.shape[1:]
    wide = value.shape[-1]
    tiles = tiles_of(query, value)
    made = _prepared(parts, table, normed, tiles)
    states = query.new_empty(len(table.chunks), heads, wide, size)
    new = query.new_empty(value.shape)
    _advanced(made, table, held, ends, None, states, new, tiles)
    state_grads = torch.empty_like(states)
    new_grad = torch.empty_like(new)
    nothing = made.grown
    source = near if far is None else far
    for first, count in reversed(table.waves):
        _retreat[(count, heads, _pieces(value, tiles))](
            made.queries,
            made.keys,
            made.w,
            grad,
            made.grown,
            made.left,
            made.weights,
            table.segments,
            nothing if source is None else source,
            nothing if near is None else near,
            state_grads,
            new_grad,
            first,
            heads,
            *grad.stride()[:2],
            0 if source is None else source.stride(0),
            0 if near is None else near.stride(0),
            num_stages=2,
            **tiles,
        )
    _inputs[(len(table.chunks), heads)](
        query,
        key,
        value,
        decay,
        beta,
        table.chunks,
        made.queries,
        made.keys,
        made.grown,
        made.left,
        made.weights,
        made.inverse,
        grad,
        new,
        new_grad,
        states,
        state_grads,
        *grads,
        heads,
        *_line_strides(*parts, grad),
        grads[3].stride(0),
        size**-0.5,
        NORMED=normed,
        num_stages=1,
        **tiles,
    )
