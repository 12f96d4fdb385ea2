# mypy: disable-error-code="no-untyped-def"
"""Kernels of a layer in `model.exact`, between its matrix products. A row is a program of its own,
and one kind of rows has one compiled kernel whatever calls it: the order in which a kernel adds up
is the compiler's choice, and may be another one for another way in which numbers lie in memory.

Legend: N rows, H heads, E numbers that are normed together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from reinforge.models.kernels.common import early, next_power

# a compiler knows that addresses are multiples of so many numbers, or knows nothing
STEP = 16


@triton.jit(do_not_specialize=["H", "more"])
def _add_norm(
    X,
    DELTA,
    WEIGHT,
    Y,
    H,
    x_n,
    x_h,
    eps,
    more,
    E: tl.constexpr,
    EARLY: tl.constexpr,
    BE: tl.constexpr,
):
    """One program per row of E numbers. Rounded where transformers rounds: the sum, the normed
    number, its product with the weight. `more`, whether there is something to add, is a number and
    no constant: a norm is one compiled kernel wherever it stands.
    """
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BE)
    weight = tl.load(WEIGHT + e, mask=e < E, other=0.0)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = X + row // H * x_n + row % H * x_h + e
    x = tl.load(at, mask=e < E, other=0.0)
    adds = (e < E) & (more != 0)
    delta = tl.load(DELTA + row * E + e, mask=adds, other=0.0)
    x = tl.where(adds, (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype), x)
    tl.store(at, x, mask=adds)
    wide = x.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / E + eps)).to(x.dtype)
    y = (weight.to(tl.float32) * normed.to(tl.float32)).to(x.dtype)
    tl.store(Y + row * E + e, y, mask=e < E)


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """x [B, E] += delta [B, E], in place, where there is one; the norm of the sum. Without a delta
    the norm of x [..., E], however it lies.
    """
    size = x.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    rows = x[:, None] if delta is not None else _regular(x)
    assert delta is None or (x.is_contiguous() and delta.is_contiguous())
    _add_norm[(y.numel() // size,)](
        rows,
        rows if delta is None else delta,
        _aligned(weight),
        y,
        rows.shape[1],
        rows.stride(0),
        rows.stride(1),
        eps,
        0 if delta is None else 1,
        E=size,
        BE=next_power(size),
        num_warps=8 if size > 2048 else 4 if size > 256 else 1,
        enable_fp_fusion=False,
        **early(),
    )
    return y


def _regular(x: Tensor) -> Tensor:
    """x [..., E] as [N, H, E] that lies in memory in one of two ways: every row begins at a
    multiple of `STEP`; or E is no such multiple, and rows lie end to end.
    """
    size = x.shape[-1]
    if x.ndim > 2 and not x.is_contiguous() and not size % STEP:
        rows = x.flatten(0, -3)
        if rows.stride(2) == 1 and not any(stride % STEP for stride in rows.stride()[:2]):
            return _aligned(rows)
    return _aligned(x.reshape(-1, 1, size))


def _aligned(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format) if x.data_ptr() % STEP else x
