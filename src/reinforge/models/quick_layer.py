"""Decoder layers on a GPU: the addition in front of a norm is a part of its kernel, and so is that
of the two gradients that meet where the residual stream forks.

For layers that compute x + attention(norm(x)) and then x + mlp(norm(x)), whatever their attention:
`replace_layers` finds them by what they compute.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from reinforge.models.decoding import is_decoding
from reinforge.models.fused_linear import is_hooked, owner_of
from reinforge.models.norms import NormKind
from reinforge.models.quick_mlp import QuickMlp
from reinforge.models.quick_norm import QuickNorm, forked_norm, takes_kernel

NORMS = ("input_layernorm", "post_attention_layernorm")
PARTS = {"self_attn", "mlp", *NORMS}


class QuickLayer:
    """The forward of a decoder layer: with the kernels where both norms can use them, anywhere else
    the module's own. Attention and the MLP stay the module's, adapters, hooks and all.
    `replace_layers` makes one per layer.
    """

    def __init__(self, module: Any):
        self.module = module
        self.defaults = defaults_of(module)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        module = self.module
        first = second = None
        if not args and not torch.compiler.is_compiling():  # the compiler has kernels of its own
            first, second = (_quick(getattr(module, name), hidden_states) for name in NORMS)
        if first is None or second is None:
            out: Tensor = type(module).forward(module, hidden_states, *args, **kwargs)
            return out
        x, normed = _forked(first, hidden_states, None)
        delta, _ = module.self_attn(hidden_states=normed, **{**self.defaults, **kwargs})
        if type(delta) is Tensor and (delta.dtype, delta.shape) == (x.dtype, x.shape):
            x, normed = _forked(second, x, delta)
        else:
            x = x + delta
            normed = second.module(x)
        made: Tensor = x + module.mlp(normed)
        return made


def _quick(norm: Any, x: Tensor) -> QuickNorm | None:
    """What norms x by a kernel in a pass of training or scoring; None: the module is to be called,
    which it is too where somebody wants to know of it.
    """
    found = owner_of(norm)
    if not isinstance(found, QuickNorm) or found.kind is NormKind.GATED or is_hooked(norm):
        return None
    return found if takes_kernel(x, norm.weight) and not is_decoding() else None


def _forked(norm: QuickNorm, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
    assert norm.eps is not None
    centred = norm.kind is NormKind.CENTRED
    return forked_norm(x, delta, norm.module.weight, norm.eps, centred=centred)


def replace_layers(module: nn.Module) -> int:
    """Lets the decoder layers of a module on a GPU use the kernels; returns how many. Asked after
    norms and MLPs have been replaced. Others keep their forward.
    """
    known: dict[type, bool] = {}
    count = 0
    for part in module.modules():
        if "forward" in vars(part) or {name for name, _ in part.named_children()} != PARTS:
            continue
        owners = [owner_of(getattr(part, name)) for name in NORMS]
        if not all(isinstance(owner, QuickNorm) for owner in owners):
            continue
        if not isinstance(owner_of(part.get_submodule("mlp")), QuickMlp):
            continue
        kind = type(part)
        if kind not in known:
            known[kind] = is_usual(part)
        if known[kind]:
            part.forward = QuickLayer(part).forward  # type: ignore[method-assign]
            count += 1
    return count


def defaults_of(layer: nn.Module) -> dict[str, Any]:
    """What its forward takes beside hidden states, and hands on to attention if it is not given."""
    parameters = list(inspect.signature(type(layer).forward).parameters.values())[2:]
    return {one.name: one.default for one in parameters if one.kind is not one.VAR_KEYWORD}


@torch.no_grad()
def is_usual(layer: nn.Module) -> bool:
    """Whether the forward of a layer is the usual one, and tells attention all it was told: tried
    with other parts in the place of its own, in bfloat16, where roundings show.
    """
    draw = torch.Generator().manual_seed(0)
    x, normed, attended, again, out = torch.randn(5, 1, 16, 8, generator=draw).to(torch.bfloat16)
    seen: dict[str, Any] = {}

    def part(name: str, made: Any) -> Any:
        def compute(*args: Any, **kwargs: Any) -> Any:
            assert name not in seen, "it is asked twice"
            seen[name] = args, kwargs
            return made

        return compute

    twin = SimpleNamespace(
        input_layernorm=part("first", normed),
        self_attn=part("attention", (attended, None)),
        post_attention_layernorm=part("second", again),
        mlp=part("mlp", out),
    )
    told = {name: object() for name in (*defaults_of(layer), "layout", "places")}
    try:
        said = type(layer).forward(twin, x, **told)
        ((first,), _), ((second,), _), ((third,), _) = (
            seen[name] for name in ("first", "second", "mlp")
        )
        _, given = seen["attention"]
    except (TypeError, ValueError, KeyError, AttributeError, AssertionError):  # it is another one
        return False
    return (
        isinstance(said, Tensor)
        and first is x
        and given.pop("hidden_states", None) is normed
        and given == told
        and torch.equal(second, x + attended)
        and third is again
        and torch.equal(said, (x + attended) + out)
    )
