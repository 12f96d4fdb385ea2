# mypy: disable-error-code="no-untyped-def"
"""Rows of numbers, or columns of weights, as e4m3 with a scale each. Twins: `Fp8Rows.of` and
`Fp8Rows.of_columns` of `models.fp8`.

Legend: N rows, K numbers of a row; of weights O rows (outputs) and K columns (inputs).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from reinforge.models.kernels.common import ceil_div, early, next_power

# as in the twin
LARGEST = tl.constexpr(448.0)
TINY = tl.constexpr(1e-12)


@triton.jit
def quantised(x):
    """A row of float32 in e4m3, and its scale, which a number that is none (NaN) makes one too: a
    maximum would leave it out.
    """
    lost = tl.max((x != x).to(tl.int32), 0) > 0
    scale = tl.where(lost, float("nan"), tl.maximum(tl.max(tl.abs(x), 0), TINY) / LARGEST)
    x = tl.minimum(tl.maximum(x / scale, -LARGEST), LARGEST)
    return x.to(tl.float8e4nv), scale


@triton.jit
def _quantise_rows(X, Q, SCALE, K, x_n, EARLY: tl.constexpr, BK: tl.constexpr):
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BK)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(X + row * x_n + k, mask=k < K, other=0.0).to(tl.float32)
    q, scale = quantised(x)
    tl.store(Q + row * K + k, q, mask=k < K)
    tl.store(SCALE + row, scale)


def quantise_rows(x: Tensor, values: Tensor, scale: Tensor) -> None:
    """x [N, K], whose rows may lie apart, into `values` [N, K] and `scale` [N]."""
    assert x.stride(1) == 1 and values.is_contiguous()
    size = x.shape[1]
    if len(x):
        _quantise_rows[(len(x),)](
            x,
            values,
            scale,
            size,
            x.stride(0),
            BK=next_power(size),
            num_warps=4 if size <= 4096 else 16,
            **early(),
        )


# ---- columns of weights ----

ROWS = tl.constexpr(128)  # of a tile of weights
COLUMNS = tl.constexpr(64)
PART = 512  # rows of weights whose largest numbers a program looks for


@triton.jit
def _larger(a, b):
    """Of two numbers; NaN where one of them is none."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _column_maxima(W, MOST, O, K, w_o, first, EACH: tl.constexpr):
    """One program per (tile of columns, part of the rows): a row of MOST [parts, K]."""
    k = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.program_id(1) * EACH
    most = tl.zeros([COLUMNS], tl.float32)
    for o in range(begin, begin + EACH, ROWS):
        row = (o + tl.arange(0, ROWS)).to(tl.int64)
        there = (row < O)[:, None] & (k < K)[None, :]
        w = tl.load(W + row[:, None] * w_o + k[None, :], mask=there, other=0.0)
        w = w.to(tl.float32)
        lost = tl.max((w != w).to(tl.int32), 0) > 0
        most = _larger(most, tl.where(lost, float("nan"), tl.max(tl.abs(w), 0)))
    tl.store(MOST + (first + tl.program_id(1)) * K + k, most, mask=k < K)


@triton.jit
def _quantise_columns(W, MOST, Q, SCALE, O, K, w_o, q_k, parts):
    """One program per (tile of columns, tile of rows): its numbers in rows of Q, whose scales every
    program finds for itself.
    """
    k = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    o = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    most = tl.zeros([COLUMNS], tl.float32)
    for part in range(parts):
        most = _larger(most, tl.load(MOST + part * K + k, mask=k < K, other=0.0))
    scale = _larger(most, TINY) / LARGEST
    there = (o < O)[:, None] & (k < K)[None, :]
    w = tl.load(W + o[:, None] * w_o + k[None, :], mask=there, other=0.0).to(tl.float32)
    w = tl.minimum(tl.maximum(w / scale[None, :], -LARGEST), LARGEST)
    turned = tl.trans(w.to(tl.float8e4nv))
    tl.store(Q + k[:, None] * q_k + o[None, :], turned, mask=(k < K)[:, None] & (o < O)[None, :])
    tl.store(SCALE + k, scale, mask=(k < K) & (tl.program_id(1) == 0))


def quantise_columns(weights: Sequence[Tensor], values: Tensor, scale: Tensor) -> None:
    """The columns of weights [O, K], one below the other, into `values` [K, all O] and `scale`
    [K].
    """
    size = weights[0].shape[1]
    parts = [ceil_div(len(weight), PART) for weight in weights]
    most = torch.empty(sum(parts), size, dtype=torch.float32, device=values.device)
    across = ceil_div(size, COLUMNS.value)
    first = 0
    for weight, count in zip(weights, parts, strict=True):
        assert weight.stride(1) == 1
        _column_maxima[(across, count)](
            weight, most, len(weight), size, weight.stride(0), first, EACH=PART, num_warps=4
        )
        first += count
    first = 0
    for weight in weights:
        _quantise_columns[(across, ceil_div(len(weight), ROWS.value))](
            weight,
            most,
            values[:, first:],
            scale,
            len(weight),
            size,
            weight.stride(0),
            values.stride(0),
            sum(parts),
            num_warps=4,
        )
        first += len(weight)
