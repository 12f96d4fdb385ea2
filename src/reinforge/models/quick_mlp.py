"""Gated MLPs on a GPU: gate and up as one product where they can be one (`models.fused_linear`),
silu(gate)·up as one kernel (`models.gates`), and all of an MLP with adapters as one function
(`models.lora_linear`).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from reinforge.models.attention import HAS_TRITON
from reinforge.models.fused_linear import joint_weights
from reinforge.models.gates import gated, gated_halves, halves_backward, kernel_gate
from reinforge.models.joint_linear import JointWeights, gradients, multiply, what_is_kept
from reinforge.models.lora_linear import lora_linears, lora_mlp, matrices
from reinforge.models.quick_norm import takes_kernel
from reinforge.models.tiled_mlp import tiled

PARTS = ("gate_proj", "up_proj", "down_proj", "act_fn")


class _GatedLinear(torch.autograd.Function):
    """`gated` of two products that are one, of which input and outputs are kept."""

    @staticmethod
    def forward(ctx, joint, x, *parameters):  # type: ignore[no-untyped-def]
        both = multiply(joint, x)
        ctx.save_for_backward(both, *what_is_kept(ctx, joint, x))
        return gated_halves(both.flatten(0, -2)).view(*x.shape[:-1], joint.sizes[0])

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        both, *kept = ctx.saved_tensors
        grad = halves_backward(both.flatten(0, -2), dy.flatten(0, -2))
        return gradients(ctx, grad.view(both.shape), *kept)


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
        found = self._adapted(x)
        out = module.down_proj(self._inner(x)) if found is None else found
        return out

    def _adapted(self, x: Tensor) -> Tensor | None:
        """All of it, where each projection has an adapter; None: not here."""
        module = self.module
        wide, last = [module.gate_proj, module.up_proj], [module.down_proj]
        of_wide = lora_linears(wide, x)
        of_last = lora_linears(last, x)
        if of_wide is None or of_last is None:
            return None
        return lora_mlp(of_wide, of_last, x, [*matrices(wide), *matrices(last)])

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
