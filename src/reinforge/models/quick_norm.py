"""RMS norms on a GPU: one kernel in place of the module's eight, and one for its gradients.

An engine's decode step would spend more time on starting those than on running them; a pass of
training would write and read every number of a norm a dozen times, and keep its input in float32.
`models.fused_decode` has fewer kernels still, for layers that it knows; compiled layers have the
compiler's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from reinforge.models.attention import HAS_TRITON
from reinforge.models.decoding import is_decoding
from reinforge.models.exact import RowWiseMode
from reinforge.models.norms import NormKind, eps_of, kind_of

NARROW = (torch.bfloat16, torch.float16)


def takes_kernel(x: Tensor, weight: Tensor) -> bool:
    """Whether a kernel computes with these: on a GPU, of one type, as plain tensors (no shapes
    without numbers, no shards) and not in what the compiler makes kernels of. Float32 trains as
    transformers computes it, exact mode has its own.
    """
    return (
        x.is_cuda
        and x.dtype == weight.dtype
        and type(x) is Tensor
        and type(weight) in (Tensor, nn.Parameter)
        and not torch.compiler.is_compiling()
        and not RowWiseMode.active()
        and (is_decoding() or x.dtype in NARROW)
    )


class _KernelNorm(torch.autograd.Function):
    """Of what it computed with, x, the weight and the gate are kept."""

    @staticmethod
    def forward(ctx, x, weight, gate, eps, centred):  # type: ignore[no-untyped-def]
        from reinforge.models.kernels import norm as kernels

        ctx.save_for_backward(x, weight, gate)
        ctx.eps = eps
        ctx.centred = centred
        return kernels.rms_norm(x, weight, eps, centred=centred, gate=gate)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        from reinforge.models.kernels import norm as kernels

        x, weight, gate = ctx.saved_tensors
        weighs = ctx.needs_input_grad[1]
        dx, dweight, dgate = kernels.rms_norm_backward(
            x, weight, ctx.eps, dy, centred=ctx.centred, gate=gate, weighs=weighs
        )
        return dx, dweight, dgate, None, None


def kernel_norm(
    x: Tensor, weight: Tensor, eps: float, *, centred: bool = False, gate: Tensor | None = None
) -> Tensor:
    """`norms.rms_norm`, `centred_norm` or `gated_norm` of x [..., E], with a gradient."""
    if gate is not None:
        gate = gate.expand(x.shape)
    out: Tensor = _KernelNorm.apply(x, weight, gate, eps, centred)
    return out


class _ForkedNorm(torch.autograd.Function):
    """Of what it computed with, the sum and the weight are kept."""

    @staticmethod
    def forward(ctx, x, delta, weight, eps, centred):  # type: ignore[no-untyped-def]
        from reinforge.models.kernels import norm as kernels

        if delta is None:
            total, y = x, kernels.rms_norm(x, weight, eps, centred=centred)
        else:
            total, y = kernels.add_rms_norm(x, delta, weight, eps, centred=centred)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(total, weight)
        ctx.eps = eps
        ctx.centred = centred
        ctx.adds = delta is not None
        return total, y

    @staticmethod
    def backward(ctx, beside, dy):  # type: ignore[no-untyped-def]
        from reinforge.models.kernels import norm as kernels

        total, weight = ctx.saved_tensors
        dx, dweight = beside, None
        if dy is not None:
            weighs = ctx.needs_input_grad[2]
            dx, dweight, _ = kernels.rms_norm_backward(
                total, weight, ctx.eps, dy, centred=ctx.centred, weighs=weighs, beside=beside
            )
        return dx, dx if ctx.adds else None, dweight, None, None


def forked_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, *, centred: bool = False
) -> tuple[Tensor, Tensor]:
    """x + delta [..., E], or x where there is no delta, and its norm, for a stream that goes on
    beside it: one kernel each way, with the bits that an addition and `kernel_norm` have. The
    gradient adds what comes back along the stream before it rounds.
    """
    found: tuple[Tensor, Tensor] = _ForkedNorm.apply(x, delta, weight, eps, centred)
    return found


class QuickNorm:
    """The forward of a norm: the kernel where it can compute it, anywhere else the module's own.
    `replace_norms` makes one per norm.
    """

    def __init__(self, module: Any, kind: NormKind):
        self.module = module
        self.kind = kind
        self.eps = eps_of(module)

    def forward(self, x: Tensor, *gate: Tensor, **kwargs: Any) -> Tensor:
        module = self.module
        if not takes_kernel(x, module.weight):
            out: Tensor = type(module).forward(module, x, *gate, **kwargs)
            return out
        gates = gate[0] if gate else kwargs.get("gate")
        assert self.eps is not None
        return kernel_norm(
            x, module.weight, self.eps, centred=self.kind is NormKind.CENTRED, gate=gates
        )


def replace_norms(module: nn.Module) -> int:
    """Lets the norms of a module on a GPU use a kernel; returns how many. Others keep theirs."""
    if not HAS_TRITON:
        return 0
    known: dict[type, NormKind | None] = {}
    count = 0
    for part in module.modules():
        if "forward" in vars(part) or "norm" not in type(part).__name__.lower():
            continue
        kind = type(part)
        if kind not in known:
            known[kind] = kind_of(part)
        found = known[kind]
        if found is not None:
            part.forward = QuickNorm(part, found).forward  # type: ignore[method-assign]
            count += 1
    return count
