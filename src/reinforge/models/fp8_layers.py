"""The linear layers of a model's decoder layers, multiplied in FP8.

Whoever computes says in which way. An engine keeps FP8 copies of the weights, which it makes again
after every update, and computes within `copies`. A trainer quantises the weights as it goes
(`train.precision`). Embedding, head, norms, attention and adapters stay in the precision of the
model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reinforge.core.errors import InputError
from reinforge.models import fp8
from reinforge.models.fp8 import Fp8Rows
from reinforge.models.fused_linear import (
    FAMILIES,
    JointOutputs,
    OtherForward,
    is_hooked,
    is_pass,
    join,
    same,
    whole,
)
from reinforge.models.joint_linear import JointWeights, joint_linear
from reinforge.models.packed import PackedModel

# where the weights of a product come from: they are not quantised, they are quantised now, or an
# engine has quantised them
Source = Literal["plain", "fresh", "copies"]
MARK = "fp8_layers"  # on a trunk: what multiplies its layers in FP8


@dataclass(slots=True)
class Fp8Weight:
    """What an engine multiplies with: a weight in FP8, and its bias."""

    rows: Fp8Rows
    bias: Tensor | None

    def part(self, first: int, last: int) -> Fp8Weight:
        bias = None if self.bias is None else self.bias[first:last]
        return Fp8Weight(self.rows.part(first, last), bias)


class Fp8Layers:
    """The linear layers of one module that can multiply in FP8, and how they do it now. `of` makes
    it for an engine with `rollout.precision: fp8` or a trainer with `train.precision: fp8`, whoever
    comes first.
    """

    def __init__(self, families: Sequence[Sequence[nn.Linear]]):
        self.families = families  # that read the same input
        self.source: Source = "plain"
        self._own: dict[int, Fp8Weight] = {}  # by place
        self._joint: dict[int, Fp8Weight] = {}  # of a family, by the place of its first
        place = 0
        for layers in families:
            family = Fp8Family(layers)
            for linear in layers:
                part = _Fp8Part(self, family, linear, place)
                linear.forward = part.forward  # type: ignore[method-assign]
                place += 1

    @classmethod
    def of(cls, model: PackedModel, where: str) -> Fp8Layers:
        """`where`: the key that asks for it."""
        if found := cls.found(model):
            return found
        fp8.check_device(model.device, where)
        _refuse_others(model, where)
        join(model.module)
        made = cls(_families(model.layers))
        vars(model.trunk)[MARK] = made
        return made

    @staticmethod
    def found(model: PackedModel) -> Fp8Layers | None:
        """Those that were made of this model; None: there are none. An engine asks in every round,
        so that it is written down and not looked for.
        """
        made: Fp8Layers | None = vars(model.trunk).get(MARK)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Fp8Layers:
        """Of a copied module: it computes in the same way, and has no copies of an engine."""
        made = object.__new__(Fp8Layers)
        memo[id(self)] = made
        made.families = []
        made.source = "plain" if self.source == "copies" else self.source
        made._own = {}
        made._joint = {}
        return made

    @property
    def linears(self) -> list[nn.Linear]:
        return [linear for family in self.families for linear in family]

    @property
    def size(self) -> int:
        """Bytes of the copies."""
        return sum(linear.weight.numel() + 4 * linear.out_features for linear in self.linears)

    # ---- an engine's copies ----

    @property
    def copied(self) -> bool:
        return bool(self._own)

    @torch.no_grad()
    def quantise(self) -> None:
        """Copies of the weights as they are now, in the memory of the earlier ones if there are
        any.
        """
        if not self.copied:
            self._allocate()
        for place, linear in enumerate(self.linears):
            mine = self._own[place]
            mine.rows.set(linear.weight)
            if mine.bias is not None:
                mine.bias.copy_(linear.bias)

    def _allocate(self) -> None:
        place = 0
        for family in self.families:
            first = family[0]
            outputs = sum(linear.out_features for linear in family)
            bias = None
            if first.bias is not None:
                bias = torch.empty(outputs, dtype=first.bias.dtype, device=first.bias.device)
            rows = Fp8Rows.empty(outputs, first.in_features, first.weight.device)
            joint = Fp8Weight(rows, bias)
            self._joint[place] = joint
            at = 0
            for linear in family:
                self._own[place] = joint.part(at, at + linear.out_features)
                at += linear.out_features
                place += 1

    def drop(self) -> None:
        """Gives the memory of the copies back."""
        self._own = {}
        self._joint = {}

    @contextmanager
    def using(self, source: Source) -> Iterator[None]:
        """Inside, weights come from there."""
        before = self.source
        self.source = source
        try:
            yield
        finally:
            self.source = before

    def joint(self, first: int, count: int) -> Fp8Weight:
        """The copy of `count` layers that read the same input, from this place on."""
        return self._own[first] if count == 1 else self._joint[first]


class Fp8Family(JointOutputs):
    """Linear layers that read the same input, or one by itself, in a pass of training or scoring on
    a GPU: the input is quantised once for all of them. `Fp8Layers` makes one per family.
    """

    def __init__(self, layers: Sequence[nn.Linear]):
        super().__init__([layer.out_features for layer in layers])
        self.layers = list(layers)

    def product(self, x: Tensor) -> Tensor | None:
        weights = self.weights(x)
        return None if weights is None else joint_linear(weights, x)

    def weights(self, x: Tensor) -> JointWeights | None:
        """What x is multiplied with; None: not here."""
        layers = self.layers
        weights: list[Tensor] = [layer.weight for layer in layers]
        if not is_pass(x, layers[0]) or any(is_hooked(layer) for layer in layers):
            return None
        if any(type(w) is not type(weights[0]) or w.dtype != x.dtype for w in weights):
            return None
        biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        return JointWeights(weights, biases, self.sizes, whole(layers), in_fp8=True)


class _Fp8Part(OtherForward):
    """The forward of one of the linear layers."""

    def __init__(self, layers: Fp8Layers, family: Fp8Family, linear: nn.Linear, place: int):
        super().__init__(linear)
        self.layers = layers
        self.family = family
        self.index = next(i for i, one in enumerate(family.layers) if one is linear)
        self.linear = linear
        self.place = place

    @property
    def steps_aside(self) -> bool:
        return self.layers.source == "plain"

    def joint_weights(self, layers: Sequence[nn.Module], x: Tensor) -> JointWeights | None:
        if self.layers.source != "fresh" or not same(self.family.layers, layers):
            return None
        return self.family.weights(x)

    def forward(self, input: Tensor) -> Tensor:
        linear = self.linear
        if self.layers.source == "copies":
            copy = self.layers.joint(self.place, 1)
            return fp8.linear_by_copy(input, copy.rows, copy.bias)
        if self.layers.source == "fresh":
            piece = self.family.piece(self.index, input)
            return fp8.linear(input, linear.weight, linear.bias) if piece is None else piece
        if self.inner is not None:
            return self.inner.forward(input)
        return F.linear(input, linear.weight, linear.bias)


def copy_of(linears: Sequence[nn.Linear]) -> Fp8Weight | None:
    """The joint FP8 copy of linear layers that read the same input, where an engine computes with
    copies; None: it does not.
    """
    part = _part(linears[0])
    if part is None or part.layers.source != "copies":
        return None
    return part.layers.joint(part.place, len(linears))


def plain(module: nn.Module) -> None:
    """Takes FP8 out of a module again, and not out of what it was copied from."""
    for layer in module.modules():
        vars(layer).pop(MARK, None)
        part = _part(layer)
        if part is None:
            continue
        del layer.forward
        if part.inner is not None:
            layer.forward = part.inner.forward


def _part(module: nn.Module) -> _Fp8Part | None:
    part = getattr(vars(module).get("forward"), "__self__", None)
    return part if isinstance(part, _Fp8Part) else None


def _families(layers: nn.ModuleList) -> list[list[nn.Linear]]:
    """The plain linear layers, alone or under an adapter, those together that read the same
    input. What an adapter adds is left out.
    """
    found: list[list[nn.Linear]] = []
    for name, parent in layers.named_modules():
        if "lora_" in name or hasattr(parent, "base_layer"):
            continue
        children = {n: getattr(child, "base_layer", child) for n, child in parent.named_children()}
        linears = {n: child for n, child in children.items() if type(child) is nn.Linear}
        for names in FAMILIES:
            family = [linears[n] for n in names if n in linears]
            if len(family) == len(names) and len({part.bias is None for part in family}) == 1:
                found.append(family)
                linears = {n: child for n, child in linears.items() if n not in names}
        found += [[linear] for linear in linears.values()]
    return found


def _refuse_others(model: PackedModel, where: str) -> None:
    if model.exact:
        raise InputError(
            "exact log-probs and products in FP8 exclude each other.",
            where=where,
            fix="Leave one of them out.",
        )
    matrices = {id(linear.weight) for family in _families(model.layers) for linear in family}
    for name, weight in model.layers.named_parameters():
        if weight.ndim > 1 and id(weight) not in matrices and "lora_" not in name:
            raise InputError(
                f"{type(model.plain).__name__} has matrices that are not plain linear layers, e.g."
                f" {name}: they would not be multiplied in FP8.",
                where=where,
                fix="Leave it out for this model.",
            )
