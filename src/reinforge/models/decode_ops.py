"""The operations of a decoder layer for one new token per sequence, each a kernel or two on a GPU
(`kernels.layer`) and plain torch elsewhere. `models.exact_ops` has the same for `model.exact`.

Legend: B sequences, E hidden size, H query heads, D head size, N outputs and K inputs of a product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reinforge.models import fp8
from reinforge.models.attention import HAS_TRITON
from reinforge.models.fp8 import Fp8Rows
from reinforge.models.fp8_layers import copy_of
from reinforge.models.fused_linear import joint_weight
from reinforge.models.norms import rms_norm
from reinforge.models.projections import Projection, adapters_of


class DecodeOps(Protocol):
    """What a `FusedLayer` is computed with: this module, or `exact_ops`."""

    def add_norm(
        self,
        x: Tensor,
        delta: Tensor | None,
        weight: Tensor,
        eps: float,
        into: Fp8Rows | None = None,
    ) -> Tensor: ...

    def head_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def product(self, x: Tensor, parts: Sequence[Projection], rows: Fp8Rows | None) -> Tensor: ...

    def gated_product(
        self, x: Tensor, parts: Sequence[Projection], rows: Fp8Rows | None
    ) -> Tensor: ...

    def add_product(self, x: Tensor, inner: Tensor, part: Projection) -> Tensor | None: ...


def _kernels(x: Tensor) -> Any:
    """The Triton kernels, where they run."""
    if not (x.is_cuda and HAS_TRITON):
        return None
    from reinforge.models.kernels import layer

    return layer


def add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, into: Fp8Rows | None = None
) -> Tensor:
    """x [B, E] += delta ([B, E], or [parts, B, E] whose parts are summed), in place; the RMS norm
    of the sum. `into`: is set to that norm in FP8 as well.
    """
    if kernels := _kernels(x):
        return kernels.add_norm(x, delta, weight, eps, into)
    if delta is not None:
        x += delta if delta.ndim == 2 else delta.sum(0).to(x.dtype)
    normed = rms_norm(x, weight, eps)
    if into is not None:
        into.set(normed)
    return normed


def head_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The RMS norm of every head of x [B, H, D], in place."""
    if kernels := _kernels(x):
        return kernels.head_norm(x, weight, eps)
    return x.copy_(rms_norm(x, weight, eps))


def silu_mul(x: Tensor) -> Tensor:
    """silu(x[:, :N])·x[:, N:] of x [B, 2N]."""
    if kernels := _kernels(x):
        return kernels.silu_mul(x)
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def add_low_rank(y: Tensor, x: Tensor, parts: Sequence[Projection]) -> Tensor:
    """What the adapters of these projections add to their outputs y [B, N] side by side, in place.
    Their matrices and the product between them are in the precision of x, as in training; the sum
    is rounded once.
    """
    adapters = adapters_of(parts)
    if not adapters:
        return y
    if _kernels(x):
        from reinforge.models.kernels import low_rank

        low_rank.add(y, x, adapters)
        return y
    wide = torch.promote_types(x.dtype, torch.float32)
    for down, up, scale, first in adapters:
        narrow = F.linear(x, down.to(x.dtype))
        piece = y[:, first : first + len(up)]
        piece.copy_(piece + F.linear(narrow.to(wide), up.to(x.dtype).to(wide)) * scale)
    return y


def product(x: Tensor, parts: Sequence[Projection], rows: Fp8Rows | None = None) -> Tensor:
    """x [B, K] through projections that read the same input, their outputs side by side. `rows`: x
    in FP8, where somebody has it already.
    """
    return add_low_rank(_joint_product(x, parts, rows), x, parts)


def _joint_product(x: Tensor, parts: Sequence[Projection], rows: Fp8Rows | None) -> Tensor:
    """`product` without what adapters add."""
    linears = [part.linear for part in parts]
    kernels = _kernels(x)
    if copy := copy_of(linears):
        if rows is None:
            rows = Fp8Rows.of(x)
        if kernels and len(x) <= kernels.FP8_ROWS:
            return kernels.few_rows(rows, copy.rows, copy.bias, dtype=x.dtype)
        return fp8.product(rows, copy.rows, copy.bias, x.dtype)
    weight, bias = joint_weight(linears)
    if kernels and len(x) <= kernels.FEW_ROWS:
        return kernels.few_rows(x, weight, bias)
    return F.linear(x, weight, bias)


def gated_product(x: Tensor, parts: Sequence[Projection], rows: Fp8Rows | None = None) -> Tensor:
    """silu(first projection)·(second projection) of x [B, K]; `rows`: see `product`."""
    kernels = _kernels(x)
    linears = [part.linear for part in parts]
    adapters = adapters_of(parts)
    if kernels and adapters:
        from reinforge.models.kernels import low_rank

        return low_rank.gated(_joint_product(x, parts, rows), x, adapters)
    if kernels and linears[0].bias is None:
        copy = copy_of(linears)
        if copy is not None and len(x) <= kernels.FP8_ROWS:
            rows = Fp8Rows.of(x) if rows is None else rows
            return kernels.gated_rows(rows, copy.rows, x.dtype)
        if copy is None and len(x) <= kernels.GATED_ROWS:
            return kernels.gated_rows(x, joint_weight(linears)[0])
    return silu_mul(product(x, parts, rows))


def add_product(x: Tensor, inner: Tensor, part: Projection) -> Tensor:
    """A projection of `inner` [B, K] that belongs to x [B, N]: what the next `add_norm` is to add,
    [B, N], or [parts, B, N] to be summed.
    """
    summands = _summands(inner, part.linear)
    if summands is None:
        return product(inner, [part])
    add_low_rank(summands[0], inner, [part])
    return summands


def _summands(x: Tensor, linear: nn.Linear) -> Tensor | None:
    """[parts, B, N] in float32, whose sum is the product of x [B, K]; None: quicker at once."""
    kernels = _kernels(x)
    if not kernels or linear.bias is not None:
        return None
    copy = copy_of([linear])
    if copy is not None and len(x) <= kernels.FP8_PART_ROWS:
        return kernels.few_rows(Fp8Rows.of(x), copy.rows, parts=True)
    if copy is None and len(x) <= kernels.PART_ROWS:
        return kernels.few_rows(x, linear.weight, parts=True)
    return None
