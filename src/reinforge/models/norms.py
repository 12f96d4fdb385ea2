"""The RMS norms of today's models, as formulas, and which of them a module is."""

from __future__ import annotations

import copy
import inspect
from enum import StrEnum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As transformers computes it: in float32, rounded before the weight."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def centred_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Gemma's and Qwen3.5's: the weight is what is added to 1, and all of it is in float32."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * (1.0 + weight.float())).to(x.dtype)


def gated_norm(x: Tensor, weight: Tensor, eps: float, gate: Tensor) -> Tensor:
    """That of gated delta nets: `rms_norm` times silu(gate)."""
    return (rms_norm(x, weight, eps) * F.silu(gate.float())).to(x.dtype)


class NormKind(StrEnum):
    """Which formula a module computes."""

    PLAIN = "plain"
    CENTRED = "centred"
    GATED = "gated"


def eps_of(norm: Any) -> float | None:
    """By the names that modelling files give it."""
    for name in ("variance_epsilon", "eps"):
        found = getattr(norm, name, None)
        if isinstance(found, float):
            return found
    return None


@torch.no_grad()
def kind_of(norm: Any) -> NormKind | None:
    """Tried on a copy in bfloat16, where roundings show. None: another formula, or no norm."""
    eps = eps_of(norm)
    if eps is None or [name for name, _ in norm.named_parameters()] != ["weight"]:
        return None
    if norm.weight.ndim != 1 or list(norm.buffers()):
        return None
    wants = [
        one
        for one in inspect.signature(norm.forward).parameters.values()
        if one.default is one.empty and one.kind is not one.VAR_KEYWORD
    ]
    if len(wants) not in (1, 2):
        return None
    twin = copy.deepcopy(norm).to_empty(device="cpu").to(torch.bfloat16)
    vars(twin).pop("forward", None)
    generator = torch.Generator().manual_seed(0)
    size = twin.weight.shape[0]
    twin.weight.copy_(torch.randn(size, generator=generator))
    x, gate = torch.randn(2, 16, size, generator=generator).to(torch.bfloat16)
    try:
        said = twin(x) if len(wants) == 1 else twin(x, gate)
    except (TypeError, ValueError, RuntimeError, AttributeError):  # it wants something else
        return None
    formulas = {
        NormKind.PLAIN: lambda: rms_norm(x, twin.weight, eps),
        NormKind.CENTRED: lambda: centred_norm(x, twin.weight, eps),
        NormKind.GATED: lambda: gated_norm(x, twin.weight, eps, gate),
    }
    for kind, formula in formulas.items():
        if (kind is NormKind.GATED) == (len(wants) == 2) and torch.equal(said, formula()):
            return kind
    return None
