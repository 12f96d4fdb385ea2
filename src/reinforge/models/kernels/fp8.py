# mypy: disable-error-code="no-untyped-def"
"""Rows of numbers as e4m3 with a scale each. Twin: `models.fp8.Fp8Rows.of`.

Legend: N rows, K numbers of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from reinforge.models.kernels.common import early, next_power

# as in the twin
LARGEST = tl.constexpr(448.0)
TINY = tl.constexpr(1e-12)


@triton.jit
def quantised(x):
    """A row of float32 in e4m3, and its scale."""
    scale = tl.maximum(tl.max(tl.abs(x), 0), TINY) / LARGEST
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
