"""The operations of a decoder layer for one new token per sequence, each a kernel or two on a GPU
(`kernels.layer`) and plain torch elsewhere. `models.exact_ops` has the same for `model.exact`.

Legend: B sequences, E hidden size, H query heads, D head size, N outputs and K inputs of a product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from reinforge.models import fp8
from reinforge.models.attention import HAS_TRITON
from reinforge.models.fp8 import Fp8Rows
from reinforge.models.fp8_layers import copy_of
from reinforge.models.fused_linear import joint_weight
from reinforge.models.norms import rms_norm


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


@dataclass(slots=True)
class Projection:
    """A linear layer, and the low-rank product that an adapter adds to it: scale·up(down(x))."""

    linear: nn.Linear
    down: nn.Linear | None = None
    up: nn.Linear | None = None
    scale: float = 1.0

    @property
    def size(self) -> int:
        return self.linear.out_features


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
    Computed in the precision of the adapter, as peft does.
    """
    first = 0
    for part in parts:
        if part.down is not None and part.up is not None:
            narrow = F.linear(x.to(part.down.weight.dtype), part.down.weight)
            piece = y[:, first : first + part.size]
            if kernels := _kernels(x):
                kernels.add_low_rank(piece, narrow, part.up.weight, part.scale)
            else:
                piece.copy_(piece + F.linear(narrow, part.up.weight) * part.scale)
        first += part.size
    return y


def is_plain(parts: Sequence[Projection]) -> bool:
    return all(part.up is None for part in parts)


def product(x: Tensor, parts: Sequence[Projection], rows: Fp8Rows | None = None) -> Tensor:
    """x [B, K] through projections that read the same input, their outputs side by side. `rows`: x
    in FP8, where somebody has it already.
    """
    linears = [part.linear for part in parts]
    kernels = _kernels(x)
    if copy := copy_of(linears):
        if rows is None:
            rows = Fp8Rows.of(x)
        if kernels and len(x) <= kernels.FP8_ROWS:
            y = kernels.few_rows(rows, copy.rows, copy.bias, dtype=x.dtype)
        else:
            y = fp8.product(rows, copy.rows, copy.bias, x.dtype)
        return add_low_rank(y, x, parts)
    weight, bias = joint_weight(linears)
    if kernels and len(x) <= kernels.FEW_ROWS:
        return add_low_rank(kernels.few_rows(x, weight, bias), x, parts)
    return add_low_rank(F.linear(x, weight, bias), x, parts)


def gated_product(x: Tensor, parts: Sequence[Projection], rows: Fp8Rows | None = None) -> Tensor:
    """silu(first projection)·(second projection) of x [B, K]; `rows`: see `product`."""
    kernels = _kernels(x)
    linears = [part.linear for part in parts]
    if kernels and is_plain(parts) and linears[0].bias is None:
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
    kernels = _kernels(x)
    if kernels and is_plain([part]) and part.linear.bias is None:
        copy = copy_of([part.linear])
        if copy is not None and len(x) <= kernels.FP8_PART_ROWS:
            return kernels.few_rows(Fp8Rows.of(inner), copy.rows, parts=True)
        if copy is None and len(x) <= kernels.PART_ROWS:
            return kernels.few_rows(inner, part.linear.weight, parts=True)
    return product(inner, [part])
