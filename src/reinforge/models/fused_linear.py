"""Linear layers that read the same input (q, k, v; gate, up) as one matrix product.

Decoding a token is many small products; a joint one takes about as long as the largest of its
parts. For an engine the weights of the parts become views of one tensor (`join`), so there is no
second copy, and whatever updates them in place updates the joint one. Who gives them other tensors
(`parameter.data = ...`) takes them apart first: see `separate`.

Training and scoring on a GPU in 16 bits multiply jointly too, with or without a gradient and
whether or not the weights are joined in memory, so that a policy has the same bits in all of them
(`models.joint_linear`). Elsewhere each layer computes for itself when there are gradients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reinforge.models.decoding import is_decoding
from reinforge.models.joint_linear import JointWeights, joint_linear
from reinforge.models.quick_norm import takes_kernel

FAMILIES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# numbers of a joint weight that training puts together for a product: larger ones would take
# memory, and their parts keep a GPU busy by themselves
LARGEST = 2**25


class JointOutputs(ABC):
    """What layers that read the same input hand out. The first computes for all; the others pick up
    what is theirs if they are asked about the very same input.
    """

    def __init__(self, sizes: Sequence[int]):
        self.sizes = list(sizes)  # outputs of each
        # the input that was multiplied, and what the layers get of the product
        self.kept: tuple[Tensor, Sequence[Tensor]] | None = None

    @abstractmethod
    def product(self, x: Tensor) -> Tensor | None:
        """The outputs side by side; None: each layer computes for itself."""

    def piece(self, index: int, input: Tensor) -> Tensor | None:
        """What the layer of this index hands out; None: it computes for itself."""
        if index == 0:
            whole = self.product(input)
            self.kept = None
            if whole is None:
                return None
            if len(self.sizes) == 1:
                return whole
            # a layer may change its own in place: nobody sees the whole again
            pieces = whole.unsafe_split_with_sizes(self.sizes, -1)
            self.kept = (input, pieces)
            return pieces[0]
        kept = self.kept  # once: another thread may compute with this layer
        if kept is None or kept[0] is not input:
            return None
        if index == len(self.sizes) - 1:
            self.kept = None
        return kept[1][index]


class FusedLinear(JointOutputs):
    """A family of linear layers. `replace_linears` and `join` make one per family."""

    def __init__(self, layers: Sequence[nn.Linear]):
        super().__init__([layer.out_features for layer in layers])
        self.layers = list(layers)
        self.small = sum(self.sizes) * layers[0].in_features <= LARGEST
        # what the layers' own are views of; None: they lie apart
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        for i, layer in enumerate(layers):
            layer.forward = FusedPart(self, layer, i).forward  # type: ignore[method-assign]

    def join(self) -> None:
        """Moves the weights into one tensor."""
        self.weight = torch.cat([layer.weight.detach() for layer in self.layers])
        for layer, rows in zip(self.layers, self.weight.split(self.sizes), strict=True):
            layer.weight.data = rows
        if self.layers[0].bias is not None:
            self.bias = torch.cat([layer.bias.detach() for layer in self.layers])
            for layer, numbers in zip(self.layers, self.bias.split(self.sizes), strict=True):
                layer.bias.data = numbers

    def product(self, x: Tensor) -> Tensor | None:
        if is_pass(x, self.layers[0]):
            weights = self.weights(x)
            return None if weights is None else joint_linear(weights, x)
        if torch.is_grad_enabled() or self.weight is None:
            return None
        return F.linear(x, self.weight, self.bias)

    def weights(self, x: Tensor) -> JointWeights | None:
        """What a pass of training or scoring multiplies x with; None: not jointly."""
        layers = self.layers
        weights: list[Tensor] = [layer.weight for layer in layers]
        kind = type(weights[0])
        if not self.small or any(type(w) is not kind or w.dtype != x.dtype for w in weights):
            return None
        if any(is_hooked(layer) for layer in layers):  # they may bring the weights
            return None
        biases: list[Tensor] = []
        if layers[0].bias is not None:
            biases = [layer.bias for layer in layers]
        return JointWeights(weights, biases, self.sizes, self.whole(weights))

    def whole(self, weights: Sequence[Tensor]) -> tuple[Tensor, Tensor | None] | None:
        """The joint weight and bias, if they are still those of the layers."""
        if self.weight is None:
            return None
        at = self.weight.data_ptr()
        for weight in weights:
            if weight.data_ptr() != at:
                return None
            at += weight.nbytes
        return self.weight, self.bias


def is_pass(x: Tensor, layer: nn.Linear) -> bool:
    """Whether x goes through training or scoring on a GPU in 16 bits."""
    return takes_kernel(x, layer.weight) and not is_decoding()


class FusedPart:
    """One of the linear layers that a `FusedLinear` computes together: it takes its part of the
    joint product.
    """

    def __init__(self, joint: FusedLinear, layer: nn.Linear, index: int):
        self.joint = joint
        self.layer = layer
        self.index = index

    def forward(self, input: Tensor) -> Tensor:
        piece = self.joint.piece(self.index, input)
        return F.linear(input, self.layer.weight, self.layer.bias) if piece is None else piece


class OtherForward(ABC):
    """A forward of a linear layer that may compute in another way. `inner`: what computes where it
    does not, the layer's part in a joint product; None: the layer itself.
    """

    def __init__(self, layer: nn.Linear):
        self.inner = fused_part(layer)

    @property
    @abstractmethod
    def steps_aside(self) -> bool:
        """Whether `inner` computes now."""

    def joint_weights(self, layers: Sequence[nn.Module], x: Tensor) -> JointWeights | None:
        """What it multiplies x with for all of these layers at once; None: not so."""
        return None


def replace_linears(module: nn.Module) -> int:
    """Lets linear layers that read the same input multiply jointly in training on a GPU; returns
    how many families there are. Weights stay where they are.
    """
    return sum(1 for _ in _families(module))


def join(module: nn.Module) -> int:
    """Joins in memory what can be joined; returns how many.

    Layers that are not plain linear ones, are trained in part or lie on several devices stay as
    they are, and joined ones are not joined again.
    """
    count = 0
    for family in _families(module):
        if family.weight is None and _alike(family.layers):
            family.join()
            count += 1
    return count


def share_joined(copy: nn.Module, module: nn.Module) -> None:
    """Lets the families of a second module of the same kind use the joint tensors of the first,
    where their layers have the very same weights.
    """
    for own, other in zip(_families(copy), _families(module), strict=True):
        pairs = zip(own.layers, other.layers, strict=True)
        if other.weight is not None and all(a.weight is b.weight for a, b in pairs):
            own.weight, own.bias = other.weight, other.bias


def _families(module: nn.Module) -> Iterator[FusedLinear]:
    """Those that there are, and those that can be made."""
    for parent in module.modules():
        for names in FAMILIES:
            parts = [getattr(parent, name, None) for name in names]
            parts = [getattr(part, "base_layer", part) for part in parts]  # of an adapter
            layers = [part for part in parts if type(part) is nn.Linear]
            if len(layers) < len(names):
                continue
            found = fused_part(layers[0])
            if found is not None:
                yield found.joint
            elif _alike(layers) and not any("forward" in vars(layer) for layer in layers):
                yield FusedLinear(layers)


def joint_weights(layers: Sequence[nn.Module], x: Tensor) -> JointWeights | None:
    """What a pass of training or scoring multiplies x with, for who goes on with the outputs side
    by side; None: the layers are to be asked one by one.
    """
    other = other_weights(layers, x)
    if other is not None:
        return other
    part = owner_of(layers[0])
    if isinstance(part, OtherForward):
        part = part.inner if part.steps_aside else None
    if not isinstance(part, FusedPart):
        return None
    joint = part.joint
    if not same(joint.layers, layers):
        return None
    return joint.weights(x) if is_pass(x, joint.layers[0]) else None


def other_weights(layers: Sequence[nn.Module], x: Tensor) -> JointWeights | None:
    """The same where another forward than the layers' own computes for all of them at once; None:
    there is none.
    """
    part = owner_of(layers[0])
    return part.joint_weights(layers, x) if isinstance(part, OtherForward) else None


def same(some: Sequence[nn.Module], others: Sequence[nn.Module]) -> bool:
    """Whether these are the same layers in the same order."""
    return all(a is b for a, b in zip_longest(some, others))


def computes_plainly(layer: nn.Module) -> bool:
    """Whether what a linear layer computes now is its product, and nobody else is to know."""
    part = owner_of(layer)
    if is_hooked(layer) or (isinstance(part, OtherForward) and not part.steps_aside):
        return False
    return "forward" not in vars(layer) or isinstance(part, OtherForward | FusedPart)


def whole(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None] | None:
    """The joint weight and bias of a family, if its layers lie in one tensor."""
    part = fused_part(layers[0])
    if part is None or not same(part.joint.layers, layers):
        return None
    return part.joint.whole([layer.weight for layer in layers])


def joint_weight(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """The weights of linear layers that read the same input, one below the other, and the biases:
    without a copy where they are joined.
    """
    if len(layers) == 1:
        return layers[0].weight, layers[0].bias
    part = fused_part(layers[0])
    if part is not None and len(part.joint.sizes) == len(layers) and part.joint.weight is not None:
        return part.joint.weight, part.joint.bias
    bias = None
    if layers[0].bias is not None:
        bias = torch.cat([layer.bias for layer in layers])
    return torch.cat([layer.weight for layer in layers]), bias


def separate(module: nn.Module) -> int:
    """Takes apart what `join` has joined, in this module and not in what it was copied from;
    returns how many families. Weights stay where they are, and from now on each layer computes with
    its own, whatever tensor that is.
    """
    count = 0
    for layer in module.modules():
        part = fused_part(layer)
        if part is not None and part.joint.weight is not None:
            part.joint.weight = part.joint.bias = None
            count += 1
    return count


def fused_part(layer: nn.Module) -> FusedPart | None:
    """The part that a layer has in a joint product."""
    owner = owner_of(layer)
    if isinstance(owner, OtherForward):
        return owner.inner
    return owner if isinstance(owner, FusedPart) else None


def owner_of(layer: nn.Module) -> Any:
    """What computes for a layer instead of its class."""
    return getattr(vars(layer).get("forward"), "__self__", None)


def _alike(layers: Sequence[nn.Linear]) -> bool:
    facts = {
        (p.in_features, p.bias is None, p.weight.dtype, p.weight.device, p.weight.requires_grad)
        for p in layers
    }
    return len(facts) == 1 and all(
        type(p.weight) is nn.Parameter and not is_hooked(p) for p in layers
    )


def is_hooked(layer: nn.Module) -> bool:
    """Whether somebody else is to know when it computes."""
    return bool(
        layer._forward_hooks
        or layer._forward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
    )
