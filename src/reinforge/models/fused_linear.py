"""Linear layers that read the same input (q, k, v; gate, up) as one matrix product while nothing is
trained.

Decoding a token is many small products; a joint one takes about as long as the largest of its
parts. The weights of the parts become views of one tensor, so there is no second copy, and whatever
updates them in place updates the joint one. Who gives them other tensors (`parameter.data = ...`)
takes them apart first: see `separate`. With gradients each layer computes for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FAMILIES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class FusedLinear:
    """The first part computes for all; the others pick up what is theirs if they are asked about
    the very same input.
    """

    def __init__(self, parts: Sequence[nn.Linear]):
        self.sizes = [part.out_features for part in parts]
        self.weight = torch.cat([part.weight.detach() for part in parts])
        self.bias = (
            torch.cat([part.bias.detach() for part in parts]) if parts[0].bias is not None else None
        )
        self.input: Tensor | None = None
        self.ready: list[Tensor] = []
        for i, part in enumerate(parts):
            part.weight.data = self.weight.split(self.sizes)[i]
            if self.bias is not None:
                part.bias.data = self.bias.split(self.sizes)[i]
            part.forward = FusedPart(self, part, i).forward  # type: ignore[method-assign]


class FusedPart:
    """One of the linear layers that a `FusedLinear` computes together: it takes its part of the
    joint product.
    """

    def __init__(self, joint: FusedLinear, layer: nn.Linear, index: int):
        self.joint = joint
        self.layer = layer
        self.index = index

    def forward(self, input: Tensor) -> Tensor:
        joint = self.joint
        if torch.is_grad_enabled():
            return F.linear(input, self.layer.weight, self.layer.bias)
        if self.index == 0:
            pieces = F.linear(input, joint.weight, joint.bias).split(joint.sizes, -1)
            joint.input = input
            joint.ready = list(pieces)
            return pieces[0]
        if joint.input is not input:
            return F.linear(input, self.layer.weight, self.layer.bias)
        piece = joint.ready[self.index]
        if self.index == len(joint.sizes) - 1:
            joint.input = None
            joint.ready = []
        return piece


class OtherForward:
    """A forward of a linear layer that may compute in another way. `inner`: what computes where it
    does not, the layer's part in a joint product; None: the layer itself.
    """

    def __init__(self, layer: nn.Linear):
        self.inner = fused_part(layer)


def join(module: nn.Module) -> int:
    """Joins what can be joined; returns how many.

    Layers that are not plain linear ones, are trained in part or lie on several devices stay as
    they are, and joined ones are not joined again.
    """
    count = 0
    for parent in module.modules():
        for names in FAMILIES:
            parts = [getattr(parent, name, None) for name in names]
            parts = [getattr(part, "base_layer", part) for part in parts]  # of an adapter
            layers = [p for p in parts if type(p) is nn.Linear and "forward" not in vars(p)]
            if len(layers) == len(names) and _alike(layers):
                FusedLinear(layers)
                count += 1
    return count


def joint_weight(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """The weights of linear layers that read the same input, one below the other, and the biases:
    without a copy where they are joined.
    """
    if len(layers) == 1:
        return layers[0].weight, layers[0].bias
    part = fused_part(layers[0])
    if part is not None and len(part.joint.sizes) == len(layers):
        return part.joint.weight, part.joint.bias
    bias = None
    if layers[0].bias is not None:
        bias = torch.cat([layer.bias for layer in layers])
    return torch.cat([layer.weight for layer in layers]), bias


def separate(module: nn.Module) -> int:
    """Takes apart what `join` has joined, in this module and not in what it was copied from;
    returns how many layers. Weights stay where they are, and from now on each layer computes with
    its own, whatever tensor that is.
    """
    count = 0
    for layer in module.modules():
        if fused_part(layer) is None:
            continue
        owner = _owner(layer)
        if isinstance(owner, OtherForward):
            owner.inner = None
        else:
            del layer.forward
        count += 1
    return count


def fused_part(layer: nn.Module) -> FusedPart | None:
    """The part that a layer has in a joint product."""
    owner = _owner(layer)
    if isinstance(owner, OtherForward):
        return owner.inner
    return owner if isinstance(owner, FusedPart) else None


def _owner(layer: nn.Module) -> Any:
    """What computes for a layer instead of its class."""
    return getattr(vars(layer).get("forward"), "__self__", None)


def _alike(layers: Sequence[nn.Linear]) -> bool:
    facts = {
        (p.in_features, p.bias is None, p.weight.dtype, p.weight.device, p.weight.requires_grad)
        for p in layers
    }
    return len(facts) == 1 and all(
        type(p.weight) is nn.Parameter and not p._forward_hooks and not p._forward_pre_hooks
        for p in layers
    )
