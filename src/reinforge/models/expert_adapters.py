"""What LoRA adapters add to the weights of experts, kept as the two thin matrices that it is made
of.

Weights of experts lie stacked in one parameter. peft wraps such a parameter and, in every forward,
adds the product of its matrices to all of it: for a token that is decoded that is a second reading
and a writing of all experts, and in training the gradient of all of it. Here the thin matrices go
to the products (`models.experts`), as they do for a linear layer.

Legend: E experts, r rank, N outputs and K inputs of an expert's product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LowRank:
    """For each expert scale · up · down is added to its weight."""

    down: Tensor  # [E, r, K]
    up: Tensor  # [E, N, r]
    scale: float

    def like(self, dtype: torch.dtype) -> LowRank:
        """In a precision, as a grouped product of the library wants them to lie: in rows of whole
        16 bytes, so that small ranks are filled up with zeros.
        """
        missing = -self.down.shape[1] % (16 // dtype.itemsize)
        down = F.pad(self.down.to(dtype), (0, 0, 0, missing))
        up = F.pad(self.up.to(dtype), (0, missing))
        return LowRank(down, up.contiguous(), self.scale)


LowRanks = Mapping[str, LowRank]  # by the name of the parameter that it is added to


def unwrapped(layer: Any) -> tuple[Any, LowRanks] | None:
    """The experts inside the wrappers of an adapter, and what is added to their weights now. None:
    there is something else about it (several adapters, merged), which is for peft.
    """
    found: dict[str, LowRank] = {}
    while hasattr(layer, "parameter_name"):
        if not layer.disable_adapters:
            active = [name for name in layer.active_adapters if name in layer.lora_A]
            if layer.merged or len(active) > 1 or layer.num_experts == 1:
                return None
            for name in active:
                found[layer.parameter_name] = _low_rank(layer, name)
        elif layer.merged:
            return None
        layer = layer.base_layer
    return layer, found


def _low_rank(layer: Any, adapter: str) -> LowRank:
    """Of a wrapped parameter: down lies there expert by expert, up rank by rank."""
    down = layer.lora_A[adapter].weight
    up = layer.lora_B[adapter].weight
    experts = layer.num_experts
    return LowRank(
        down.view(experts, -1, down.shape[1]),
        up.view(len(up), -1, experts).permute(2, 0, 1),
        float(layer.scaling[adapter]),
    )
