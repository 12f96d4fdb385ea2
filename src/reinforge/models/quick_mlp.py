"""Gated MLPs on a GPU: gate and up as one product where they can be one (`models.fused_linear`),
silu(gate)·up as one kernel instead of two, with one for its gradients instead of four, which keeps
gate and up alone.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reinforge.models.attention import HAS_TRITON
from reinforge.models.fused_linear import joint_weights
from reinforge.models.joint_linear import JointWeights, gradients, multiply, what_is_kept
from reinforge.models.quick_norm import takes_kernel
from reinforge.models.tiled_mlp import tiled

PARTS = ("gate_proj", "up_proj", "down_proj", "act_fn")


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
        return _gated_halves(x)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        return _halves_backward(x, dy)


class _GatedLinear(torch.autograd.Function):
    """`gated` of two products that are one, of which input and outputs are kept."""

    @staticmethod
    def forward(ctx, joint, x, *parameters):  # type: ignore[no-untyped-def]
        both = multiply(joint, x)
        ctx.save_for_backward(both, *what_is_kept(ctx, joint, x))
        return _gated_halves(both.flatten(0, -2)).view(*x.shape[:-1], joint.sizes[0])

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        both, *kept = ctx.saved_tensors
        grad = _halves_backward(both.flatten(0, -2), dy.flatten(0, -2))
        return gradients(ctx, grad.view(both.shape), *kept)


def _gated_halves(x: Tensor) -> Tensor:
    """[P, I] of x [P, 2 I]."""
    from reinforge.models.kernels import gate as kernels

    return kernels.silu_mul(*x.chunk(2, -1))


def _halves_backward(x: Tensor, dy: Tensor) -> Tensor:
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


def gated_linear(joint: JointWeights, x: Tensor) -> Tensor:
    """`gated` [..., I] of the two products of x, gate before up, with a gradient."""
    out: Tensor = _GatedLinear.apply(joint, x, *joint.weights, *joint.biases)
    return out


class QuickMlp:
    """The forward of a gated MLP: the kernel where it can compute it, anywhere else the module's
    own. The projections stay the module's, adapters and all. `replace_mlps` makes one per MLP.
    """

    def __init__(self, module: Any):
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        module = self.module
        if not takes_kernel(x, x):
            out: Tensor = type(module).forward(module, x)
            return out
        out = module.down_proj(self._inner(x))
        return out

    def _inner(self, x: Tensor) -> Tensor:
        """[..., I] that the last projection reads."""
        parts = (self.module.gate_proj, self.module.up_proj)
        joint = joint_weights(parts, x)
        if joint is not None:
            return gated_linear(joint, x)
        gate, up = (part(x) for part in parts)
        return kernel_gate(gate, up) if takes_kernel(gate, up) else gated(gate, up)


def replace_mlps(module: nn.Module) -> int:
    """Lets the gated MLPs of a module on a GPU use a kernel; returns how many. Others keep their
    forward.
    """
    if not HAS_TRITON:
        return 0
    known: dict[type, bool] = {}
    count = 0
    for part in module.modules():
        if "forward" in vars(part) or not all(hasattr(part, name) for name in PARTS):
            continue
        kind = type(part)
        if kind not in known:
            known[kind] = is_gated(part)
        if known[kind]:
            part.forward = QuickMlp(part).forward  # type: ignore[method-assign]
            count += 1
    return count


def is_quick(module: nn.Module) -> bool:
    """Whether a kernel computes its norms and gates where it is trained in 16 bits on a GPU."""

    def computes(part: nn.Module) -> Any:
        tiles = tiled(part)
        forward = vars(part).get("forward") if tiles is None else tiles.plain
        return getattr(forward, "__self__", None)

    return any(isinstance(computes(part), QuickMlp) for part in module.modules())


@torch.no_grad()
def is_gated(mlp: Any) -> bool:
    """Whether its forward is down(gated(gate(x), up(x))): tried with other projections in the place
    of its own, in bfloat16, where roundings show.
    """
    draw = torch.Generator().manual_seed(0)
    x, gate, up = torch.randn(3, 16, 8, generator=draw).to(torch.bfloat16)
    seen: list[Tensor] = []

    def projection(out: Tensor) -> Any:
        def project(given: Tensor) -> Tensor:
            seen.append(given)
            return out

        return project

    twin = SimpleNamespace(
        gate_proj=projection(gate),
        up_proj=projection(up),
        down_proj=lambda inner: inner + 1,
        act_fn=mlp.act_fn,
        config=vars(mlp).get("config"),
        training=False,
    )
    try:
        said = type(mlp).forward(twin, x)
    except (TypeError, ValueError, RuntimeError, AttributeError):  # it wants something else
        return False
    return (
        isinstance(said, Tensor)
        and len(seen) == 2
        and all(given is x for given in seen)
        and torch.equal(said, gated(gate, up) + 1)
    )
