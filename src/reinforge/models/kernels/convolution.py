# mypy: disable-error-code="no-untyped-def"
"""The short causal convolution of each channel over a pack, and its gradients: every output sees K
rows of the input, wherever they lie, so segments restart and continue shared prompts without a
copy. Twin in plain torch: `models.convolution`.

The backward pass computes outputs again. Its sums over tokens are those of fixed blocks of rows,
and each gradient of an input is one sum in a fixed order: nothing is added up by atomic operations.

Legend: N outputs, M rows of the input, C channels, K taps.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from reinforge.models.kernels.common import ceil_div, next_power, rounded_silu

ROWS = 32  # of a tile
CHANNELS = 128
# of a tile where gradients of weights are added up, which takes twice the registers; and tiles of
# which one program does
SUMMED_ROWS = 16
STEPS = 16
SHARED = 16  # outputs that see a shared row, at once


@triton.jit
def _tile(X, row, c, wide, x_n):
    """Rows of X, 0 where there is none."""
    where = X + row.to(tl.int64)[:, None] * x_n + c[None, :]
    return tl.load(where, mask=(row >= 0)[:, None] & wide[None, :], other=0.0).to(tl.float32)


@triton.jit
def _before_activation(
    X,
    SEEN,
    W,
    BIAS,
    n,
    there,
    c,
    wide,
    x_n,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
):
    """Outputs n before the activation, in float32."""
    acc = tl.zeros((BN, BC), tl.float32)
    for tap in tl.static_range(TAPS):
        row = tl.load(SEEN + n * TAPS + tap, mask=there, other=-1)
        w = tl.load(W + c * TAPS + tap, mask=wide, other=0.0).to(tl.float32)
        acc += _tile(X, row, c, wide, x_n) * w[None, :]
    if HAS_BIAS:
        acc += tl.load(BIAS + c, mask=wide, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit(do_not_specialize=["N"])
def _forward(
    X,
    SEEN,
    W,
    BIAS,
    Y,
    N,
    C,
    x_n,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
):
    """One program per (tile of outputs, piece of the channels)."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    there = n < N
    wide = c < C
    z = _before_activation(X, SEEN, W, BIAS, n, there, c, wide, x_n, TAPS, HAS_BIAS, BN, BC)
    y = rounded_silu(z, Y.dtype.element_ty) if SILU else z.to(Y.dtype.element_ty)
    to = Y + n.to(tl.int64)[:, None] * C + c[None, :]
    tl.store(to, y, mask=there[:, None] & wide[None, :])


@triton.jit(do_not_specialize=["N"])
def _outputs(
    X,
    SEEN,
    W,
    BIAS,
    GRAD,
    Z_GRAD,
    SUMS,
    N,
    C,
    x_n,
    g_n,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    TILES: tl.constexpr,
    BK: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
):
    """One program per (TILES tiles of outputs, piece of the channels): gradients before the
    activation, and of weights and bias what these outputs give.
    """
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    wide = c < C
    k = tl.arange(0, BK)
    sums = tl.zeros((BK, BC), tl.float32)
    for tile in range(TILES):
        n = (tl.program_id(0) * TILES + tile) * BN + tl.arange(0, BN)
        there = n < N
        both = there[:, None] & wide[None, :]
        line = n.to(tl.int64)[:, None]
        grad = tl.load(GRAD + line * g_n + c[None, :], mask=both, other=0.0).to(tl.float32)
        if SILU:
            z = _before_activation(X, SEEN, W, BIAS, n, there, c, wide, x_n, TAPS, HAS_BIAS, BN, BC)
            z = z.to(X.dtype.element_ty).to(tl.float32)  # as the activation saw it
            gate = 1.0 / (1.0 + tl.exp(-z))
            low = (grad * gate * (1.0 + z * (1.0 - gate))).to(Z_GRAD.dtype.element_ty)
            tl.store(Z_GRAD + line * C + c[None, :], low, mask=both)
            grad = low.to(tl.float32)
        if HAS_SUMS:
            for tap in tl.static_range(TAPS):
                row = tl.load(SEEN + n * TAPS + tap, mask=there, other=-1)
                part = tl.sum(grad * _tile(X, row, c, wide, x_n), 0)
                sums += tl.where((k == tap)[:, None], part[None, :], 0.0)
            if HAS_BIAS:
                sums += tl.where((k == TAPS)[:, None], tl.sum(grad, 0)[None, :], 0.0)
    if HAS_SUMS:
        kinds = TAPS + 1 if HAS_BIAS else TAPS
        to = SUMS + (tl.program_id(0) * kinds + k).to(tl.int64)[:, None] * C + c[None, :]
        tl.store(to, sums, mask=(k < kinds)[:, None] & wide[None, :])


@triton.jit(do_not_specialize=["M"])
def _inputs(
    Z_GRAD,
    SEEN_BY,
    W,
    X_GRAD,
    M,
    C,
    z_n,
    TAPS: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
):
    """One program per (tile of rows, piece of the channels): the gradient of rows that each tap of
    at most one output sees.
    """
    m = tl.program_id(0) * BN + tl.arange(0, BN)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    there = m < M
    wide = c < C
    acc = tl.zeros((BN, BC), tl.float32)
    for tap in tl.static_range(TAPS):
        row = tl.load(SEEN_BY + m * TAPS + tap, mask=there, other=-1)
        w = tl.load(W + c * TAPS + tap, mask=wide, other=0.0).to(tl.float32)
        acc += _tile(Z_GRAD, row, c, wide, z_n) * w[None, :]
    to = X_GRAD + m.to(tl.int64)[:, None] * C + c[None, :]
    tl.store(to, acc.to(X_GRAD.dtype.element_ty), mask=there[:, None] & wide[None, :])


@triton.jit
def _shared_inputs(
    Z_GRAD,
    SHARED_ROWS,
    BEGINS,
    PAIRS,
    W,
    X_GRAD,
    C,
    z_n,
    TAPS: tl.constexpr,
    BE: tl.constexpr,
    BC: tl.constexpr,
):
    """One program per (shared row, piece of the channels): the gradient of a row that many outputs
    see by the same tap, over all PAIRS (output * TAPS + tap) that see it.
    """
    m = tl.load(SHARED_ROWS + tl.program_id(0)).to(tl.int64)
    begin = tl.load(BEGINS + tl.program_id(0))
    end = tl.load(BEGINS + tl.program_id(0) + 1)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    wide = c < C
    acc = tl.zeros((BC,), tl.float32)
    for first in range(begin, end, BE):
        i = first + tl.arange(0, BE)
        pair = tl.load(PAIRS + i, mask=i < end, other=0)
        row = tl.where(i < end, pair // TAPS, -1)
        w = tl.load(W + c[None, :] * TAPS + (pair % TAPS)[:, None], mask=wide[None, :], other=0.0)
        acc += tl.sum(_tile(Z_GRAD, row, c, wide, z_n) * w.to(tl.float32), 0)
    tl.store(X_GRAD + m * C + c, acc.to(X_GRAD.dtype.element_ty), mask=wide)


def _pieces(channels: int) -> int:
    return int(ceil_div(channels, CHANNELS))


def _tiles(weight: Tensor, bias: Tensor | None, rows: int) -> dict[str, Any]:
    """Constants of launches over outputs."""
    return {
        "TAPS": weight.shape[1],
        "HAS_BIAS": bias is not None,
        "BN": rows,
        "BC": CHANNELS,
        "num_warps": 4,
    }


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, seen: Tensor, silu: bool) -> Tensor:
    """x [M, C], weight [C, K], the rows [N, K] that the taps of each output see (-1: nothing) ->
    [N, C]. Channels lie side by side.
    """
    count, channels = len(seen), x.shape[1]
    y = torch.empty(count, channels, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    _forward[(ceil_div(count, ROWS), _pieces(channels))](
        x,
        seen,
        weight,
        weight if bias is None else bias,
        y,
        count,
        channels,
        x.stride(0),
        SILU=silu,
        **_tiles(weight, bias, ROWS),
    )
    return y


def output_grads(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seen: Tensor,
    grad: Tensor,
    silu: bool,
    summed: bool,
) -> tuple[Tensor, Tensor | None]:
    """From gradients [N, C] those before the activation [N, C] and, where they are asked for, those
    of the weights' columns and of the bias below them, [K or K + 1, C] in float32.
    """
    count, channels = grad.shape
    kinds = weight.shape[1] + (bias is not None)
    if not silu and not summed:
        return grad, None
    if grad.numel() == 0:
        return grad, grad.new_zeros(kinds, channels, dtype=torch.float32) if summed else None
    steps = STEPS if summed else 1
    blocks = ceil_div(count, SUMMED_ROWS * steps)
    before = torch.empty(grad.shape, dtype=x.dtype, device=x.device) if silu else grad
    sums = x.new_empty(blocks if summed else 1, kinds, channels, dtype=torch.float32)
    _outputs[(blocks, _pieces(channels))](
        x,
        seen,
        weight,
        weight if bias is None else bias,
        grad,
        before,
        sums,
        count,
        channels,
        x.stride(0),
        grad.stride(0),
        SILU=silu,
        HAS_SUMS=summed,
        TILES=steps,
        BK=next_power(kinds),
        **_tiles(weight, bias, SUMMED_ROWS),
    )
    return before, sums.sum(0) if summed else None


def input_grads(
    before: Tensor,
    weight: Tensor,
    seen_by: Tensor,
    shared: tuple[Tensor, Tensor, Tensor],
) -> Tensor:
    """From gradients before the activation those of the inputs, [M, C]. `seen_by` [M, K]: which
    output sees each row by each tap, -1: none. `shared`: rows that several see by the same tap,
    where the pairs of each begin [n + 1], and the pairs.
    """
    rows, taps = seen_by.shape
    channels = before.shape[1]
    grads = torch.empty(rows, channels, dtype=before.dtype, device=before.device)
    if grads.numel() == 0:
        return grads
    _inputs[(ceil_div(rows, ROWS), _pieces(channels))](
        before,
        seen_by,
        weight,
        grads,
        rows,
        channels,
        before.stride(0),
        TAPS=taps,
        BN=ROWS,
        BC=CHANNELS,
        num_warps=4,
    )
    if len(shared[0]):
        _shared_inputs[(len(shared[0]), _pieces(channels))](
            before,
            *shared,
            weight,
            grads,
            channels,
            before.stride(0),
            TAPS=taps,
            BE=SHARED,
            BC=CHANNELS,
            num_warps=4,
        )
    return grads
