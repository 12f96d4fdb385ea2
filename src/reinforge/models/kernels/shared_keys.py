# mypy: disable-error-code="no-untyped-def"
"""Gradients of keys and values that were copied to several places, added up by token: one kernel
for both. Twin: the gradient of `index_select`.

Legend: N tokens, P places, W numbers of a token in all its heads.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from reinforge.models.kernels.common import ceil_div

ROWS = 16  # tokens of a program
COLUMNS = 128  # numbers of each token
AT_ONCE = 4  # places of a token that are on their way at the same time


@triton.jit(do_not_specialize=["N"])
def _sum_places(
    DK,
    DV,
    SUM_K,
    SUM_V,
    STARTS,
    PLACES,
    N,
    WK: tl.constexpr,
    WV: tl.constexpr,
    BN: tl.constexpr,
    BW: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """One program for BN tokens and BW of their numbers: first those of keys, then of values."""
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    column = tl.program_id(1)
    of_keys: tl.constexpr = (WK + BW - 1) // BW
    begin = tl.load(STARTS + row, mask=row < N, other=0)
    end = tl.load(STARTS + row + 1, mask=row < N, other=0)
    if column < of_keys:
        _sum_tile(DK, SUM_K, PLACES, begin, end, row, N, column, WK, BN, BW, AT_ONCE)
    else:
        _sum_tile(DV, SUM_V, PLACES, begin, end, row, N, column - of_keys, WV, BN, BW, AT_ONCE)


@triton.jit
def _sum_tile(
    GRADS,
    SUMS,
    PLACES,
    begin,
    end,
    row,
    N,
    column,
    W: tl.constexpr,
    BN: tl.constexpr,
    BW: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Place after place in ascending order, in float32; rounded once."""
    w = column * BW + tl.arange(0, BW)
    total = tl.zeros([BN, BW], tl.float32)
    for first in range(0, tl.max(end - begin, 0), AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            at = begin + first + i
            place = tl.load(PLACES + at, mask=at < end, other=0).to(tl.int64)
            there = (at < end)[:, None] & (w < W)[None, :]
            part = tl.load(GRADS + place[:, None] * W + w[None, :], mask=there, other=0.0)
            total += part.to(tl.float32)
    target = SUMS + row.to(tl.int64)[:, None] * W + w[None, :]
    there = (row < N)[:, None] & (w < W)[None, :]
    tl.store(target, total.to(SUMS.dtype.element_ty), mask=there)


def sum_places(dk: Tensor, dv: Tensor, starts: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """dk and dv [P, K, D] -> [N, K, D] of each: for each token the sum of its places, which are
    places [P] from starts [N+1] on.
    """
    tokens = starts.shape[0] - 1
    sum_k, sum_v = (x.new_empty(tokens, x.shape[1], x.shape[2]) for x in (dk, dv))
    width_k, width_v = (x.shape[1] * x.shape[2] for x in (dk, dv))
    programs = ceil_div(tokens, ROWS)
    blocks = ceil_div(width_k, COLUMNS) + ceil_div(width_v, COLUMNS)
    _sum_places[(programs, blocks)](
        dk.contiguous(),
        dv.contiguous(),
        sum_k,
        sum_v,
        starts,
        places,
        tokens,
        width_k,
        width_v,
        BN=ROWS,
        BW=COLUMNS,
        AT_ONCE=AT_ONCE,
        num_warps=4,
    )
    return sum_k, sum_v
