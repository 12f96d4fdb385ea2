"""Weights on their way from a trainer to an engine with a copy of its own: named, in buckets, and
checked on arrival.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from reinforge.core.weights import Weights
from reinforge.models.causal import VALUE_HEAD

BUCKET = 256 << 20  # bytes of one object
SAMPLED = 256  # values of a tensor that its fingerprint reads


def trained_of(weights: Weights) -> dict[str, Tensor]:
    """The parameters that training changes and generation reads, by their names in the module: of
    an adapter, only the adapter's.
    """
    assert weights.module is not None, f"weights of kind {weights.kind} have no module to read"
    named = {
        name: p
        for name, p in weights.module.named_parameters()
        if not name.startswith(f"{VALUE_HEAD}.")
    }
    return {name: p.detach() for name, p in named.items() if p.requires_grad} or {
        name: p.detach() for name, p in named.items()
    }


def buckets_of(
    pairs: Iterable[tuple[str, Tensor]], size: int = BUCKET
) -> Iterator[list[tuple[str, Tensor]]]:
    bucket: list[tuple[str, Tensor]] = []
    room = size
    for name, tensor in pairs:
        nbytes = tensor.numel() * tensor.element_size()
        if bucket and nbytes > room:
            yield bucket
            bucket = []
            room = size
        bucket.append((name, tensor))
        room -= nbytes
    if bucket:
        yield bucket


def fingerprint(named: Mapping[str, Tensor]) -> str:
    """Of names, shapes and a spread of values of every tensor: a tensor that kept its old weights,
    or got another's, is seen.
    """
    seen = hashlib.sha256()
    for name in sorted(named):
        flat = named[name].detach().reshape(-1)
        some = flat[:: max(1, len(flat) // SAMPLED)].cpu().contiguous()
        seen.update(f"{name}{tuple(named[name].shape)}{some.dtype}".encode())
        seen.update(some.view(torch.uint8).numpy().tobytes() if len(some) else b"")
    return seen.hexdigest()


@torch.no_grad()
def put_into(module: nn.Module, named: Mapping[str, Tensor], mark: str) -> Weights:
    """Writes the tensors into a module, proves that they are the ones that were sent, and gives
    them as an engine wants them.
    """
    own: dict[str, Any] = dict(module.named_parameters())
    missing = sorted(named.keys() - own.keys())
    assert not missing, f"this engine's model has no {missing[0]}"
    for name, tensor in named.items():
        own[name].copy_(tensor)
    found = fingerprint({name: own[name] for name in named})
    if found != mark:
        raise RuntimeError(
            f"the weights that arrived are not those that were sent: fingerprint {found[:12]}, not"
            f" {mark[:12]}"
        )
    return Weights("shared", module=module, fingerprint=mark)
