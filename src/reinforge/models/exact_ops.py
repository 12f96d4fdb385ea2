"""The operations of `models.decode_ops` for `model.exact`: to the bit what the layer's own forward
gives in `RowWiseMode`, in which they run.

Legend: B sequences, E hidden size, H query heads, D head size, N outputs and K inputs of a product.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reinforge.models.decode_ops import silu_mul
from reinforge.models.exact_norm import scaled_norm
from reinforge.models.fp8 import Fp8Rows
from reinforge.models.fused_linear import joint_weight
from reinforge.models.projections import Projection


def add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, into: Fp8Rows | None = None
) -> Tensor:
    """x [B, E] += delta, in place; the RMS norm of the sum."""
    assert into is None, "exact mode has no FP8"
    if x.is_cuda:
        from reinforge.models.kernels import exact_layer as kernels

        return kernels.add_norm(x, delta, weight, eps)
    if delta is not None:
        x += delta
    return scaled_norm(x, weight, eps)


def head_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The RMS norm of every head of x [B, H, D]."""
    return scaled_norm(x, weight, eps)


def product(x: Tensor, parts: Sequence[Projection], rows: Fp8Rows | None = None) -> Tensor:
    """x [B, K] through projections that read the same input, their outputs side by side. What
    adapters add is computed as peft does: in their precision, rounded after each operation.
    """
    y = _joint_product(x, [part.linear for part in parts])
    first = 0
    for part in parts:
        if part.down is not None and part.up is not None:
            narrow = F.linear(x.to(part.down.weight.dtype), part.down.weight)
            piece = y[:, first : first + part.size]
            piece.copy_(piece + F.linear(narrow, part.up.weight) * part.scale)
        first += part.size
    return y


def _joint_product(x: Tensor, layers: Sequence[nn.Linear]) -> Tensor:
    """On a CPU each by itself: a library may add up in another order for a wider weight."""
    if x.is_cuda:
        from reinforge.models.kernels.exact_product import step_product

        return step_product(x, *joint_weight(layers))
    return torch.cat([F.linear(x, layer.weight, layer.bias) for layer in layers], -1)


def gated_product(x: Tensor, parts: Sequence[Projection], rows: Fp8Rows | None = None) -> Tensor:
    """silu(first projection)·(second projection) of x [B, K]."""
    return silu_mul(product(x, parts))


def add_product(x: Tensor, inner: Tensor, part: Projection) -> Tensor:
    """A projection of `inner` [B, K] that the next `add_norm` is to add to x [B, N]."""
    return product(inner, [part])
