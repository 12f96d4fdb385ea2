"""How many weights a model has, of which kind: counted on the module, which may lie on torch's
`meta` device, where it has shapes and no numbers.

A mixture of experts and a model whose layers keep state are counted as they are, because the module
is what is looked at and not a formula.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from reinforge.models.mixers import is_mixer
from reinforge.models.routing import holds_experts

# in the order in which they are told
KINDS = (
    "embedding",
    "head",
    "attention",
    "state layers",
    "MLP",
    "experts",
    "router",
    "norms",
    "other",
    "adapter",
)
# what architectures call the norms of queries and keys
HEAD_NORMS = frozenset(
    f"{who}_{norm}" for who in ("q", "k", "query", "key") for norm in ("norm", "layernorm")
)
OF_LAYERS = frozenset({"attention", "state layers", "MLP", "experts", "router", "other"})


@dataclass(frozen=True, slots=True)
class WeightCounts:
    """The weights of a model by kind. `count_weights` makes it; `plan` tells it, and `ModelFacts`
    takes its sums.
    """

    kinds: dict[str, int]  # those that there are, in the order of KINDS
    trained: int
    matrices: int  # in the layers
    met: int  # of these, by one token: of experts those that are chosen for it
    linear: int  # of the matrices, those of linear layers: what NF4 packs
    packed: int  # in NF4
    head_norms: bool  # whether queries and keys have norms of their own

    @property
    def base(self) -> int:
        """All but the adapter's."""
        return sum(count for kind, count in self.kinds.items() if kind != "adapter")


def count_weights(module: Any, *, experts: int = 1, active: int = 1) -> WeightCounts:
    """Every parameter of the text model once. `active` of `experts` meet a token."""
    found = dict.fromkeys(KINDS, 0)
    trained = matrices = linear = of_experts = packed = 0
    seen: set[int] = set()
    for kind, owner, parameter in _parameters(module):
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        size = _size(parameter)
        found[kind] += size
        packed += size if _is_packed(parameter) else 0
        trained += size if parameter.requires_grad else 0
        if kind in OF_LAYERS and parameter.ndim > 1 and not isinstance(owner, nn.Embedding):
            matrices += size
            linear += size if isinstance(owner, nn.Linear) else 0
            of_experts += size if kind == "experts" else 0
    idle = of_experts - of_experts * min(active, experts) // experts
    return WeightCounts(
        {kind: count for kind, count in found.items() if count},
        trained,
        matrices,
        matrices - idle,
        linear,
        packed,
        any(name.rpartition(".")[2] in HEAD_NORMS for name, _ in module.named_modules()),
    )


def _size(parameter: Any) -> int:
    """In NF4 two numbers lie in a byte."""
    return int(parameter.numel()) * (2 if _is_packed(parameter) else 1)


def _is_packed(parameter: Any) -> bool:
    return getattr(parameter, "quant_state", None) is not None


def _parameters(module: Any) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """Each with its kind and the module that it belongs to."""
    base = module.get_base_model() if hasattr(module, "get_base_model") else module
    embedding = base.get_input_embeddings()
    head = base.get_output_embeddings()  # None: a reward model's
    for name, owner in module.named_modules():
        for own, parameter in owner.named_parameters(recurse=False):
            if owner is embedding:
                kind = "embedding"
            elif owner is head:
                kind = "head"
            else:
                kind = _kind(module, name, own)
            yield kind, owner, parameter


def _kind(module: nn.Module, name: str, own: str) -> str:
    """By the modules that a parameter lies in, the nearest first."""
    whole = f"{name}.{own}"
    if "lora_" in whole or "modules_to_save" in whole:
        return "adapter"
    parts = name.split(".") if name else []
    inside = [module.get_submodule(".".join(parts[:n])) for n in range(len(parts) + 1)]
    if any(
        called == "experts" and holds_experts(block)
        for block, called in zip(inside[:-1], parts, strict=True)
    ):
        return "experts"
    for part, called in zip(reversed(inside[1:]), reversed(parts), strict=True):
        if found := _kind_of(part, called):
            return found
    return "other"


def _kind_of(part: nn.Module, called: str) -> str | None:
    """What a module is, by its class and its name in the module above; None: it does not say."""
    name = type(part).__name__
    if "Norm" in name:
        return "norms"
    if called in ("shared_expert", "shared_experts", "shared_mlp"):
        return "MLP"
    if holds_experts(part):
        return "router"  # what of a block is neither an expert nor shared
    if is_mixer(part):
        return "state layers"
    if "Attention" in name or called in ("self_attn", "attention", "attn"):
        return "attention"
    if "MLP" in name or "FeedForward" in name or called in ("mlp", "feed_forward"):
        return "MLP"
    return None
