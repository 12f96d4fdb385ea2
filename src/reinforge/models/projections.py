"""Linear layers with the LoRA adapters around them, as decoding computes them.

Legend: N outputs and K inputs of a layer, R rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn


@dataclass(slots=True)
class Projection:
    """A linear layer, and the low-rank product that an adapter adds to it: scale·up(down(x)).
    `models.fused_decode` finds them in a module.
    """

    linear: nn.Linear
    down: nn.Linear | None = None
    up: nn.Linear | None = None
    scale: float = 1.0

    @property
    def size(self) -> int:
        return self.linear.out_features


class Adapter(NamedTuple):
    """What an adapter adds to N of the outputs of several projections side by side: scale·up(down).
    `models.decode_ops` and its kernels compute it.
    """

    down: Tensor  # [R, K]
    up: Tensor  # [N, R]
    scale: float
    first: int  # column of the first of these outputs

    @property
    def rank(self) -> int:
        return len(self.down)


def adapters_of(parts: Sequence[Projection]) -> list[Adapter]:
    """Those of the projections that have one."""
    found = []
    first = 0
    for part in parts:
        if part.down is not None and part.up is not None:
            found.append(Adapter(part.down.weight, part.up.weight, part.scale, first))
        first += part.size
    return found
