"""Linear layers with LoRA adapters in training and scoring on a GPU in 16 bits: what an adapter
adds is added where the layer's product lies, and a gated MLP keeps its gate and up alone.

As a sum of modules, an adapter writes a product as wide as its layer's, one times the scale, and
their sum; its gradients add up copies of the layer's input. Layers in front of an adapter are
frozen, so they need no gradients of weights.

Legend: M tokens, K inputs, N outputs of all layers together, R ranks of their adapters together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reinforge.models import fp8
from reinforge.models.adapter_dropout import AdapterDropout
from reinforge.models.fused_linear import (
    FAMILIES,
    JointOutputs,
    computes_plainly,
    is_hooked,
    is_pass,
    other_weights,
    whole,
)
from reinforge.models.gates import gated_halves, halves_backward


@dataclass(slots=True)
class LoraLinears:
    """Frozen linear layers that read the same input, and the scales of their adapters, whose
    matrices are arguments of the functions: all of A, then all of B. `lora_linears` makes it for a
    pass.
    """

    weights: list[Tensor]
    biases: list[Tensor]  # of all layers or of none
    scales: list[float]
    # the weights and biases in one tensor each, where they lie so in memory
    whole: tuple[Tensor, Tensor | None] | None = None
    in_fp8: bool = False  # the products of the frozen layers (`train.precision`)

    @property
    def sizes(self) -> list[int]:
        """Outputs of each."""
        return [len(weight) for weight in self.weights]

    @property
    def matrices(self) -> list[Tensor]:
        """The weights, as one where they lie so."""
        return self.weights if self.whole is None else [self.whole[0]]

    def adapters(self, given: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """A of all adapters [R, K], and B of each, in the precision of the layers."""
        count = len(self.weights)
        downs = [down.to(dtype) for down in given[:count]]
        return _one(downs), [up.to(dtype) for up in given[count:]]

    # ---- x [M, K] to y [M, N] ----

    def multiply(self, x: Tensor, down: Tensor, ups: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """y, and x through A [M, R], which the gradients need."""
        narrow = F.linear(x, down)
        return self.widen(self.base(x), narrow, ups), narrow

    def widen(self, y: Tensor, narrow: Tensor, ups: Sequence[Tensor]) -> Tensor:
        """y with what the adapters add to it, in place."""
        outs = y.split(self.sizes, 1)
        smalls = narrow.split([up.shape[1] for up in ups], 1)
        for out, small, up, scale in zip(outs, smalls, ups, self.scales, strict=True):
            out.addmm_(small, up.t(), alpha=scale)
        return y

    def base(self, x: Tensor) -> Tensor:
        """What the frozen layers give."""
        if self.in_fp8:
            return fp8.joint_product(x, self.matrices, self.biases)
        if len(self.weights) == 1:
            return F.linear(x, self.weights[0], self.biases[0] if self.biases else None)
        if self.whole is not None:
            return F.linear(x, *self.whole)
        y = x.new_empty(len(x), sum(self.sizes))
        for i, (out, weight) in enumerate(zip(y.split(self.sizes, 1), self.weights, strict=True)):
            if self.biases:
                torch.addmm(self.biases[i], x, weight.t(), out=out)
            else:
                torch.mm(x, weight.t(), out=out)
        return y

    def gradients(
        self,
        dy: Tensor,
        x: Tensor,
        narrow: Tensor,
        down: Tensor,
        ups: Sequence[Tensor],
        wanted: bool = True,
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Of x, if it is wanted, and of all A, then all B."""
        dnarrow = self.narrow_gradient(dy, ups)
        of_downs = torch.mm(dnarrow.t(), x).split([up.shape[1] for up in ups])
        dx = self.base_gradient(dy).addmm_(dnarrow, down) if wanted else None
        return dx, [*of_downs, *self.up_gradients(dy, narrow, ups)]

    def narrow_gradient(self, dy: Tensor, ups: Sequence[Tensor]) -> Tensor:
        """Of x through A [M, R]."""
        ranks = [up.shape[1] for up in ups]
        dnarrow = dy.new_empty(len(dy), sum(ranks))
        columns = zip(dy.split(self.sizes, 1), dnarrow.split(ranks, 1), strict=True)
        for (dout, dsmall), up, scale in zip(columns, ups, self.scales, strict=True):
            torch.mm(dout, up, out=dsmall).mul_(scale)
        return dnarrow

    def up_gradients(self, dy: Tensor, narrow: Tensor, ups: Sequence[Tensor]) -> list[Tensor]:
        """Of all B."""
        columns = zip(
            dy.split(self.sizes, 1),
            narrow.split([up.shape[1] for up in ups], 1),
            self.scales,
            strict=True,
        )
        return [torch.mm(dout.t(), small).mul_(scale) for dout, small, scale in columns]

    def base_gradient(self, dy: Tensor) -> Tensor:
        """Of x, through the frozen layers alone."""
        if self.in_fp8:
            return fp8.input_gradient(dy, self.matrices)
        if self.whole is not None:
            return torch.mm(dy, self.whole[0])
        pieces = dy.split(self.sizes, 1)
        dx = torch.mm(pieces[0], self.weights[0])
        for piece, weight in zip(pieces[1:], self.weights[1:], strict=True):
            dx.addmm_(piece, weight)
        return dx


def _one(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _cast(grads: Sequence[Tensor], ctx: Any) -> list[Tensor]:
    """Gradients in the precision of the adapters, float32."""
    return [grad.to(dtype) for grad, dtype in zip(grads, ctx.dtypes, strict=True)]


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, linears, x, *adapters):  # type: ignore[no-untyped-def]
        rows = x.flatten(0, -2)
        down, ups = linears.adapters(adapters, x.dtype)
        y, narrow = linears.multiply(rows, down, ups)
        ctx.save_for_backward(rows, narrow, down, *ups)
        ctx.linears = linears
        ctx.dtypes = [part.dtype for part in adapters]
        return y.view(*x.shape[:-1], y.shape[1])

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        rows, narrow, down, *ups = ctx.saved_tensors
        dx, grads = ctx.linears.gradients(
            dy.flatten(0, -2), rows, narrow, down, ups, ctx.needs_input_grad[1]
        )
        return None, None if dx is None else dx.view(*dy.shape[:-1], -1), *_cast(grads, ctx)


class _LoraMlp(torch.autograd.Function):
    """down(silu(gate)·up), each with its adapter. What `down` reads is computed again for its
    gradients.

    Kernels compute with what the frozen gate and up give, which is kept as it is
    (`kernels.lora_gate`); where they cannot, what the adapters add is added to it in memory.
    """

    @staticmethod
    def forward(ctx, wide, last, x, *adapters):  # type: ignore[no-untyped-def]
        rows = x.flatten(0, -2)
        down, ups = wide.adapters(adapters[:4], x.dtype)
        last_down, last_ups = last.adapters(adapters[4:], x.dtype)
        both, narrow = wide.base(rows), F.linear(rows, down)
        ctx.kernels = _kernels(both, [up.shape[1] for up in (*ups, *last_ups)])
        if ctx.kernels is None:
            inner = gated_halves(wide.widen(both, narrow, ups))
            narrow_last = F.linear(inner, last_down)
        else:
            inner, narrow_last = ctx.kernels.gated(both, narrow, ups, wide.scales, last_down)
        y = last.widen(last.base(inner), narrow_last, last_ups)
        ctx.save_for_backward(rows, both, narrow, narrow_last, down, *ups, last_down, *last_ups)
        ctx.parts = wide, last
        ctx.dtypes = [part.dtype for part in adapters]
        return y.view(*x.shape[:-1], y.shape[1])

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        rows, both, narrow, narrow_last, down, *ups, last_down, last_up = ctx.saved_tensors
        wide, last = ctx.parts
        wanted = ctx.needs_input_grad[2]
        dout = dy.flatten(0, -2)
        if ctx.kernels is None:
            inner = gated_halves(both)
            dinner, of_last = last.gradients(dout, inner, narrow_last, last_down, [last_up])
            dboth = halves_backward(both, dinner)
            dx, of_wide = wide.gradients(dboth, rows, narrow, down, ups, wanted)
        else:
            dnarrow = last.narrow_gradient(dout, [last_up])
            dboth, (*of_ups, of_last_down) = ctx.kernels.gated_backward(
                both, narrow, ups, wide.scales, last_down, last.base_gradient(dout), dnarrow
            )
            of_last = [of_last_down, *last.up_gradients(dout, narrow_last, [last_up])]
            dnarrow = wide.narrow_gradient(dboth, ups)
            of_downs = torch.mm(dnarrow.t(), rows).split([up.shape[1] for up in ups])
            dx = wide.base_gradient(dboth).addmm_(dnarrow, down) if wanted else None
            of_wide = [*of_downs, *of_ups]
        dx = None if dx is None else dx.view(*dy.shape[:-1], -1)
        return None, None, dx, *_cast([*of_wide, *of_last], ctx)


def _kernels(both: Tensor, ranks: Sequence[int]) -> Any:
    """The module of kernels, where it takes gate and up [M, 2I] with adapters of such ranks."""
    from reinforge.models.kernels import lora_gate

    return lora_gate if lora_gate.takes(both, ranks) else None


def lora_linear(linears: LoraLinears, x: Tensor, adapters: Sequence[Tensor]) -> Tensor:
    """[..., N] of x [..., K]: the outputs side by side. `adapters`: all of A, then all of B."""
    out: Tensor = _LoraLinear.apply(linears, x, *adapters)
    return out


def lora_mlp(wide: LoraLinears, last: LoraLinears, x: Tensor, adapters: Sequence[Tensor]) -> Tensor:
    """A gated MLP: `wide` are gate and up, `last` is down; `adapters`: of gate and up, as
    `lora_linear` takes them, then of down.
    """
    out: Tensor = _LoraMlp.apply(wide, last, x, *adapters)
    return out


# ---- layers of peft ----


class LeanLora:
    """The forward of a plain LoRA layer of peft: y = base(x) + s B A dropout(x) in the precision of
    x, and peft's own way whenever there is anything else about it (several adapters, merged, a
    mixed batch). `adapters.make_lean` makes one per layer.
    """

    def __init__(self, layer: Any, usual: Any):
        self.layer = layer
        self.usual = usual
        self.family: LoraFamily | None = None
        self.index = 0  # in its family

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        layer = self.layer
        if layer.disable_adapters and not layer.merged:
            out: Tensor = layer.base_layer(x, *args, **kwargs)
            return out
        if layer.merged or len(layer.active_adapters) != 1 or kwargs:
            out = self.usual(x, *args, **kwargs)
            return out
        if not args and (found := self._pass(x)) is not None:
            return found
        name = layer.active_adapters[0]
        down = layer.lora_A[name].weight.to(x.dtype)
        up = layer.lora_B[name].weight.to(x.dtype)
        narrow = F.linear(layer.lora_dropout[name](x), down)
        out = layer.base_layer(x, *args) + F.linear(narrow, up) * layer.scaling[name]
        return out

    def _pass(self, x: Tensor) -> Tensor | None:
        """In a pass of training or scoring, for all of the family at once; None: not here."""
        if torch.compiler.is_compiling():  # it has kernels of its own, and no use for what follows
            return None
        if self.family is not None:
            found = self.family.piece(self.index, x)
            if found is not None:
                return found
        linears = lora_linears([self.layer], x)
        return None if linears is None else lora_linear(linears, x, matrices([self.layer]))


class LoraFamily(JointOutputs):
    """LoRA layers that read the same input. `join_adapters` makes one per family."""

    def __init__(self, layers: Sequence[Any]):
        super().__init__([layer.out_features for layer in layers])
        self.layers = list(layers)

    def product(self, x: Tensor) -> Tensor | None:
        linears = lora_linears(self.layers, x)
        return None if linears is None else lora_linear(linears, x, matrices(self.layers))


def join_adapters(module: nn.Module) -> int:
    """Lets LoRA layers that read the same input compute together; returns how many families."""
    count = 0
    for parent in module.modules():
        for names in FAMILIES:
            layers = [getattr(parent, name, None) for name in names]
            leans = [lean for lean in map(_lean, layers) if lean is not None]
            if len(leans) == len(names):
                family = LoraFamily(layers)
                for i, lean in enumerate(leans):
                    lean.family, lean.index = family, i
                count += 1
    return count


def lora_linears(layers: Sequence[Any], x: Tensor) -> LoraLinears | None:
    """What a pass of training or scoring multiplies x with; None: the layers are to be asked one
    by one.
    """
    if not all(_is_lora(layer) for layer in layers):
        return None
    bases = [layer.base_layer for layer in layers]
    if not all(is_pass(x, base) for base in bases):
        return None
    other = other_weights(bases, x)
    if other is None and not all(computes_plainly(base) for base in bases):
        return None
    biased = {base.bias is not None for base in bases}
    if len(biased) > 1:
        return None
    return LoraLinears(
        [base.weight for base in bases],
        [base.bias for base in bases] if biased == {True} else [],
        [float(layer.scaling[layer.active_adapters[0]]) for layer in layers],
        whole(bases),
        in_fp8=other is not None and other.in_fp8,
    )


def matrices(layers: Sequence[Any]) -> list[Tensor]:
    """All of A, then all of B."""
    return [
        getattr(layer, side)[layer.active_adapters[0]].weight
        for side in ("lora_A", "lora_B")
        for layer in layers
    ]


def _is_lora(layer: Any) -> bool:
    """Whether it adds one plain adapter to one frozen plain layer now, without dropout."""
    if _lean(layer) is None or layer.merged or layer.disable_adapters:
        return False
    if len(layer.active_adapters) != 1 or layer.active_adapters[0] not in layer.lora_A:
        return False
    name = layer.active_adapters[0]
    dropout = layer.lora_dropout[name]
    if isinstance(dropout, AdapterDropout) and dropout.rows is not None:
        return False
    if any(is_hooked(part) for part in (layer, layer.lora_A[name], layer.lora_B[name])):
        return False
    if any(type(part) is not nn.Parameter for part in matrices([layer])):
        return False
    base = layer.base_layer
    return type(base) is nn.Linear and not base.weight.requires_grad


def _lean(layer: Any) -> LeanLora | None:
    found = getattr(getattr(layer, "__dict__", {}).get("forward"), "__self__", None)
    return found if isinstance(found, LeanLora) else None
