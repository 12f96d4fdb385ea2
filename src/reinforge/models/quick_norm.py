"""RMS norms of an engine on a GPU: one kernel in place of the module's eight.

In the forward of a decode step most kernels belong to norms, and each costs more to start than to
run. `models.fused_decode` has fewer still, for layers that it knows; this is for all others.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from reinforge.models.attention import HAS_TRITON
from reinforge.models.decoding import is_decoding
from reinforge.models.norms import NormKind, eps_of, kind_of


class QuickNorm:
    """The forward of a norm: the kernel while decoding, anywhere else the module's own.
    `replace_norms` makes one per norm.
    """

    def __init__(self, module: Any, kind: NormKind):
        self.module = module
        self.kind = kind
        self.eps = eps_of(module)

    def forward(self, x: Tensor, *gate: Tensor, **kwargs: Any) -> Tensor:
        module = self.module
        if not (is_decoding() and x.is_cuda and x.dtype == module.weight.dtype):
            out: Tensor = type(module).forward(module, x, *gate, **kwargs)
            return out
        from reinforge.models.kernels import norm as kernels

        gates = gate[0] if gate else kwargs.get("gate")
        assert self.eps is not None
        return kernels.rms_norm(
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
