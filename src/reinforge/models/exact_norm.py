"""RMS norms of `model.exact` on a GPU: one kernel for the module's own forward and for
`models.fused_decode`, so that both have the same bits by construction.

Legend: N tokens, H heads, E numbers that are normed together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from reinforge.models.exact import RowWiseMode
from reinforge.models.norms import NormKind, kind_of, rms_norm
from reinforge.models.quick_norm import QuickNorm


class _ScaledNorm(torch.autograd.Function):
    """y = w·n with n = x·r, r = 1 / sqrt(mean(x²) + eps). With h = w·∂y:
    ∂x = r·(h - n·mean(h·n)), ∂w = Σ ∂y·n over all rows.
    """

    @staticmethod
    def forward(ctx, x, weight, eps):  # type: ignore[no-untyped-def]
        from reinforge.models.kernels import exact_layer as kernels

        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return kernels.add_norm(x, None, weight, eps)

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        wide = x.float()
        g = g.float()
        r = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + ctx.eps)
        normed = wide * r
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            h = g * weight.float()
            grad_x = (r * (h - normed * (h * normed).mean(-1, keepdim=True))).to(x.dtype)
        if ctx.needs_input_grad[1]:
            grad_w = (g * normed).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
        return grad_x, grad_w, None


def scaled_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`norms.rms_norm` of the last dimension of x [..., E], each row alone."""
    if x.is_cuda:
        out: Tensor = _ScaledNorm.apply(x, weight, eps)
        return out
    with RowWiseMode():
        return rms_norm(x, weight, eps)


class ExactNorm:
    """The forward of an RMS norm inside `RowWiseMode` on a GPU; anywhere else it is what it was.
    `replace_norms` makes one per norm.
    """

    def __init__(self, module: Any, before: Callable[..., Tensor] | None):
        self.module = module
        self.before = before  # None: the forward of its class

    def forward(self, x: Tensor) -> Tensor:
        module = self.module
        if x.is_cuda and x.dtype == module.weight.dtype and RowWiseMode.active():
            return scaled_norm(x, module.weight, module.variance_epsilon)
        out: Tensor = self.before(x) if self.before else type(module).forward(module, x)
        return out


def replace_norms(module: nn.Module) -> int:
    """Lets the norms of a module whose arithmetic is that of `rms_norm` use one kernel; returns how
    many. Others keep theirs.
    """
    known: dict[type, bool] = {}
    count = 0
    for part in module.modules():
        before = vars(part).get("forward")
        quick = isinstance(getattr(before, "__self__", None), QuickNorm)
        if not hasattr(part, "variance_epsilon") or (before is not None and not quick):
            continue
        kind = type(part)
        if kind not in known:
            known[kind] = kind_of(part) is NormKind.PLAIN
        if known[kind]:
            part.forward = ExactNorm(part, before).forward  # type: ignore[method-assign]
            count += 1
    return count
