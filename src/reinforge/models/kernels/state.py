# mypy: disable-error-code="no-untyped-def"
"""Layers that keep state: one more token for each of several sequences, whose slots are read and
written in place, and tokens one after the other. Twins in plain torch: `state.RowStates` and
`recurrences.GatedDelta`.

Legend: N tokens, C channels, K taps of a convolution; S segments, L their padded length, H heads,
D size of a key, V size of a value.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from reinforge.models.kernels.common import ceil_div, early, next_power, rounded_silu


@triton.jit
def _convolve(
    X,
    STATE,
    SLOTS,
    W,
    BIAS,
    Y,
    C,
    x_n,
    x_c,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    EARLY: tl.constexpr,
    BC: tl.constexpr,
):
    """One program per (token, piece of the channels). STATE [slots, TAPS - 1, C] moves on."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    there = c < C
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.load(SLOTS + row).to(tl.int64)
    x = tl.load(X + row * x_n + c * x_c, mask=there, other=0.0)
    held = STATE + slot * (TAPS - 1) * C + c
    acc = x.to(tl.float32) * tl.load(W + c * TAPS + TAPS - 1, mask=there, other=0.0).to(tl.float32)
    for tap in tl.static_range(TAPS - 1):
        old = tl.load(held + tap * C, mask=there, other=0.0)
        w = tl.load(W + c * TAPS + tap, mask=there, other=0.0).to(tl.float32)
        acc += old.to(tl.float32) * w
        if tap > 0:
            tl.store(held + (tap - 1) * C, old, mask=there)
    if TAPS > 1:
        tl.store(held + (TAPS - 2) * C, x.to(STATE.dtype.element_ty), mask=there)
    if HAS_BIAS:
        acc += tl.load(BIAS + c, mask=there, other=0.0).to(tl.float32)
    y = rounded_silu(acc, Y.dtype.element_ty) if SILU else acc.to(Y.dtype.element_ty)
    tl.store(Y + row * C + c, y, mask=there)


def convolve(
    x: Tensor,
    state: Tensor,
    slots: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool = False,
) -> Tensor:
    """x [N, C] after the inputs that its slots hold, [slots, K - 1, C]; weight [C, K] -> [N, C]."""
    rows, channels = x.shape
    y = torch.empty(rows, channels, dtype=x.dtype, device=x.device)
    weight = weight.contiguous()
    _convolve[(rows, ceil_div(channels, 1024))](
        x,
        state,
        slots,
        weight,
        weight if bias is None else bias,
        y,
        channels,
        x.stride(0),
        x.stride(1),
        TAPS=weight.shape[1],
        HAS_BIAS=bias is not None,
        SILU=silu,
        BC=1024,
        num_warps=4,
        **early(),
    )
    return y


STRIDES = ("q_s", "q_t", "q_h", "k_s", "k_t", "k_h", "v_s", "v_t", "v_h")
MORE = ("g_s", "g_t", "g_h", "b_s", "b_t", "b_h")


# one compiled kernel, however many tokens there are and wherever they lie: so a token has the same
# bits in a prompt, in a pack and by itself
@triton.jit(do_not_specialize=["L", "H", "begun", *STRIDES, *MORE])
def _delta(
    Q,
    K,
    VALUE,
    G,
    BETA,
    HELD,
    STATE,
    SLOTS,
    OUT,
    L,
    H,
    begun,
    q_s,
    q_t,
    q_h,
    k_s,
    k_t,
    k_h,
    v_s,
    v_t,
    v_h,
    g_s,
    g_t,
    g_h,
    b_s,
    b_t,
    b_h,
    scale,
    D: tl.constexpr,
    V: tl.constexpr,
    NORMED: tl.constexpr,
    EARLY: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
):
    """One program per (segment, head, piece of the values): L tokens, one after the other, from the
    state in HELD, which goes to STATE.
    """
    segment = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, BD)
    v = tl.program_id(2) * BV + tl.arange(0, BV)
    there = (d < D)[:, None] & (v < V)[None, :]
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.load(SLOTS + segment).to(tl.int64)
    at = (slot * H + head) * D * V + d[:, None] * V + v[None, :]
    state = tl.load(HELD + at, mask=there & (begun != 0), other=0.0).to(tl.float32)
    q_at = Q + segment * q_s + head * q_h + d
    k_at = K + segment * k_s + head * k_h + d
    v_at = VALUE + segment * v_s + head * v_h + v
    for t in range(L):
        q = tl.load(q_at + t * q_t, mask=d < D, other=0.0).to(tl.float32)
        k = tl.load(k_at + t * k_t, mask=d < D, other=0.0).to(tl.float32)
        value = tl.load(v_at + t * v_t, mask=v < V, other=0.0).to(tl.float32)
        decay = tl.exp(tl.load(G + segment * g_s + t * g_t + head * g_h).to(tl.float32))
        beta = tl.load(BETA + segment * b_s + t * b_t + head * b_h).to(tl.float32)
        if NORMED:
            q = q * tl.rsqrt(tl.sum(q * q, 0) + 1e-6)
            k = k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
        state = state * decay
        known = tl.sum(state * k[:, None], 0)
        state = state + k[:, None] * ((value - known) * beta)[None, :]
        out = tl.sum(state * (q * scale)[:, None], 0)
        to = ((segment * L + t) * H + head) * V + v
        tl.store(OUT + to, out.to(OUT.dtype.element_ty), mask=v < V)
    tl.store(STATE + at, state.to(STATE.dtype.element_ty), mask=there)


def delta_scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    held: Tensor | None,
    state: Tensor,
    slots: Tensor,
    normed: bool,
) -> Tensor:
    """The gated delta rule, token by token: query and key [S, L, H, D], value [S, L, H, V], decay
    (a logarithm) and beta [S, L, H] -> [S, L, H, V]. Segments begin with what their slots [S] hold
    in `held` [slots, H, D, V], or with nothing, and leave their states in those of `state`.
    """
    segments, length, heads, size = query.shape
    wide = value.shape[-1]
    out = torch.empty(segments, length, heads, wide, dtype=value.dtype, device=value.device)
    # the last dimension of each lies in one piece
    parts = [x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value)]
    piece = min(32, next_power(wide))
    _delta[(segments, heads, ceil_div(wide, piece))](
        *parts,
        decay,
        beta,
        state if held is None else held,
        state,
        slots,
        out,
        length,
        heads,
        0 if held is None else 1,
        *(stride for x in (*parts, decay, beta) for stride in x.stride()[:3]),
        size**-0.5,
        D=size,
        V=wide,
        NORMED=normed,
        BD=next_power(size),
        BV=piece,
        num_warps=4,
        **early(),
    )
    return out
