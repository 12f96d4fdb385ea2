"""A module's weights as (checkpoint name, tensor): what `save_pretrained` would write, one at a
time, with the adapter in them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from reinforge.models.adapters import _written_out, in_use, is_adapted, whole_modules
from reinforge.models.causal import VALUE_HEAD


@torch.no_grad()
def named_weights(
    module: nn.Module, *, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Tied weights come once, a value head does not come.

    `dtype`: of what comes, where it is not the module's own (an NF4 base).
    """
    plain: Any = module.get_base_model() if hasattr(module, "get_base_model") else module  # type: ignore[operator]
    found = _plain(plain) if not is_adapted(module) else _merged(plain, dtype)
    pairs = ((name, tensor) for name, tensor in found if not name.startswith(VALUE_HEAD))
    # stored under other names than it is computed with (experts, mostly)
    if getattr(plain, "_weight_conversions", None) != []:
        from transformers.core_model_loading import revert_weight_conversion

        yield from revert_weight_conversion(plain, dict(pairs)).items()
    else:
        yield from pairs


class LowRankUpdate(NamedTuple):
    """What an adapter adds to a weight: b @ a."""

    a: Tensor  # [r, in]
    b: Tensor  # [out, r], the scale in it


@torch.no_grad()
def low_rank(module: nn.Module) -> dict[str, LowRankUpdate] | None:
    """The adapter alone, by the names of the weights it changes.

    None where weights are no plain sum of base and product: no adapter, DoRA, embeddings, a base in
    4 bits, one that is stored under other names or trained as well.
    """
    if not is_adapted(module):
        return None
    from peft.tuners.lora import LoraLayer

    plain: Any = module.get_base_model()  # type: ignore[operator]
    layers = {name: layer for name, layer in plain.named_modules() if isinstance(layer, LoraLayer)}
    others = [
        name
        for name, p in plain.named_parameters()
        if p.requires_grad and ".lora_" not in name and not name.startswith(VALUE_HEAD)
    ]
    if (
        others
        or not all(_is_sum(layer) for layer in layers.values())
        or not _stored_as_computed(plain, dict(base_weights(module)))
    ):
        return None
    found = {}
    for name, layer in layers.items():
        used: Any = layer.active_adapters
        a = torch.cat([layer.lora_A[adapter].weight.float() for adapter in used])
        b = torch.cat(
            [layer.lora_B[adapter].weight.float() * layer.scaling[adapter] for adapter in used], 1
        )
        found[f"{name}.weight"] = LowRankUpdate(a, b)
    return found


def low_rank_pairs(found: Mapping[str, LowRankUpdate]) -> Iterator[tuple[str, Tensor]]:
    """`NAME/a` and `NAME/b` of every weight: an adapter as it travels."""
    for name, (a, b) in found.items():
        yield f"{name}/a", a
        yield f"{name}/b", b


def added(
    base: Iterable[tuple[str, Tensor]], low: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The weights below an adapter with the adapter in them, rounded once: what `named_weights`
    gives of the module that has both.
    """
    for name, weight in base:
        if f"{name}/a" in low:
            weight = (weight.float() + low[f"{name}/b"] @ low[f"{name}/a"]).to(weight.dtype)
        yield name, weight


def _stored_as_computed(plain: Any, found: dict[str, Tensor]) -> bool:
    """Whether a checkpoint has the names that the module has."""
    if getattr(plain, "_weight_conversions", None) == []:
        return True
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(plain, dict(found)).keys() == found.keys()


def _is_sum(layer: Any) -> bool:
    base = layer.get_base_layer()
    return (
        type(base) is nn.Linear
        and not (
            layer.merged
            or layer.disable_adapters
            or any(layer.use_dora.values())
            or any(layer.lora_bias.values())
        )
        and not getattr(layer, "fan_in_fan_out", False)
        and all(adapter in layer.lora_A for adapter in layer.active_adapters)
    )


def base_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """As `named_weights`, with the adapter left out."""
    plain: Any = module.get_base_model()  # type: ignore[operator]
    for name, tensor in _plain(plain):
        if ".lora_" not in name and not name.startswith(VALUE_HEAD):
            yield name.replace(".base_layer.", "."), tensor


def _plain(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    seen: set[str] = set()
    for name, parameter in module.named_parameters():
        seen.add(name)
        yield name, parameter.detach()
    tied = set(getattr(module, "_tied_weights_keys", None) or ())
    shared = {p.data_ptr() for p in module.parameters()}
    for name, tensor in module.state_dict().items():  # buffers that are saved
        if name not in seen and name not in tied and tensor.data_ptr() not in shared:
            yield name, tensor


def _merged(plain: nn.Module, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Base weights under their own names; of an adapted one, the sum of base and adapter; of a
    module that is trained whole, the trained ones.
    """
    from peft.tuners.lora import LoraLayer

    layers = {name: layer for name, layer in plain.named_modules() if isinstance(layer, LoraLayer)}
    for name, layer in layers.items():
        if name.removesuffix(".base_layer") in layers and name.endswith(".base_layer"):
            # one of several adapters around one module, which its outermost one answers for
            continue
        yield from ((f"{name}.{key}", tensor) for key, tensor in _of_layer(layer, dtype))
    whole = whole_modules(plain)
    for name, part in whole.items():
        yield from ((f"{name}.{key}", tensor) for key, tensor in _plain(in_use(part)))
    for name, tensor in _plain(plain):
        if not any(name.startswith(f"{layer}.") for layer in (*layers, *whole)):
            yield name, tensor


def _of_layer(layer: Any, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Everything of the module that a layer of an adapter wraps.

    Several wrap one module where it keeps several matrices, as the experts of a mixture do: each of
    them has the name of its own.
    """
    from peft.tuners.lora import LoraLayer

    base = layer.get_base_layer()
    adapted = dict[str, Any]()
    while isinstance(layer, LoraLayer):
        adapted[getattr(layer, "parameter_name", "weight")] = layer
        layer = layer.base_layer
    for key, parameter in base.named_parameters():
        yield key, _sum(adapted[key], base, key, dtype) if key in adapted else parameter.detach()
    saved = base.state_dict().keys()
    yield from ((key, buffer) for key, buffer in base.named_buffers() if key in saved)


def _sum(layer: Any, base: Any, key: str, dtype: torch.dtype | None) -> Tensor:
    if type(base).__name__ == "Linear4bit":
        weight = _written_out(base)
        for adapter in layer.active_adapters:
            weight += layer.get_delta_weight(adapter).to(weight.dtype)
        return weight.to(dtype or base.compute_dtype)
    own = getattr(base, key).detach()
    if layer.merged or layer.disable_adapters:
        return own  # type: ignore[no-any-return]
    if any(layer.use_dora.values()):
        twin = copy.deepcopy(layer)  # merging divides by lengths, which cannot be undone to the bit
        twin.merge()
        return twin.get_base_layer().weight.detach()  # type: ignore[no-any-return]
    weight = own.float() + sum(
        layer.get_delta_weight(adapter).float() for adapter in layer.active_adapters
    )
    return weight.to(own.dtype)
