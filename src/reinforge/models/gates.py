"""silu(gate)·up on a GPU: one kernel instead of two, with one for its gradients instead of four,
which keeps gate and up alone.

Legend: P tokens, I numbers of each.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """As transformers computes it."""
    return F.silu(gate) * up


class _KernelGate(torch.autograd.Function):
    """`gated`, of which gate and up are kept."""

    @staticmethod
    def forward(ctx, gate, up):  # type: ignore[no-untyped-def]
        from reinforge.models.kernels import gate as kernels

        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return kernels.silu_mul(gate.view(1, -1), up.view(1, -1)).view(gate.shape)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        from reinforge.models.kernels import gate as kernels

        gate, up = ctx.saved_tensors
        grads = torch.empty_like(gate), torch.empty_like(up)
        given = [x.view(1, -1) for x in (gate, up, dy.contiguous(), *grads)]
        kernels.silu_mul_backward(*given)  # type: ignore[call-arg]
        return grads


class _JointGate(torch.autograd.Function):
    """`gated` of the two halves of rows."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        x = x.contiguous()
        ctx.save_for_backward(x)
        return gated_halves(x)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        return halves_backward(x, dy)


def gated_halves(x: Tensor) -> Tensor:
    """`gated` [P, I] of x [P, 2 I], gate before up. Without a gradient."""
    from reinforge.models.kernels import gate as kernels

    return kernels.silu_mul(*x.chunk(2, -1))


def halves_backward(x: Tensor, dy: Tensor) -> Tensor:
    """The gradient [P, 2 I] of what `gated_halves` read, of that of its outputs dy [P, I]."""
    from reinforge.models.kernels import gate as kernels

    dx = torch.empty_like(x)
    kernels.silu_mul_backward(*x.chunk(2, -1), dy.contiguous(), *dx.chunk(2, -1))  # type: ignore[call-arg]
    return dx


def kernel_gate(gate: Tensor, up: Tensor) -> Tensor:
    """`gated`, with a gradient."""
    out: Tensor = _KernelGate.apply(gate, up)
    return out


def joint_gate(x: Tensor) -> Tensor:
    """`gated` of x [P, 2 I], gate before up, with a gradient."""
    out: Tensor = _JointGate.apply(x)
    return out
