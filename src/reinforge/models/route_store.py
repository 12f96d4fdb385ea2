"""The experts of every token in the cache, at the place of its keys and values: they are shared,
copied, preempted and found again with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reinforge.core.arrays import ints, to_device
from reinforge.core.routes import narrow


@dataclass(frozen=True, slots=True)
class RouteShape:
    """What the routers of a model choose for a token: k of so many experts in each block."""

    blocks: int
    k: int
    experts: int

    @property
    def dtype(self) -> torch.dtype:
        return narrow(torch.zeros(0), self.experts).dtype

    @property
    def token_bytes(self) -> int:
        return self.blocks * self.k * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class RouteStore:
    """Of one cache. The engine's forwards write it (`keep`), and a completion takes its part along
    (`of`).
    """

    kept: Tensor  # [cache blocks, block_size, L, k]
    taken: Callable[[], Tensor]  # [N, L, k] of the newest forward

    @classmethod
    def allocate(
        cls,
        shape: RouteShape,
        taken: Callable[[], Tensor],
        blocks: int,
        block_size: int,
        device: torch.device,
    ) -> RouteStore:
        size = (blocks, block_size, shape.blocks, shape.k)
        return cls(torch.zeros(size, dtype=shape.dtype, device=device), taken)

    def keep(self, slots: Tensor) -> None:
        """The choices of the newest forward, whose tokens stand at `slots` [N] of the cache."""
        self._flat.index_copy_(0, slots, self.taken().to(self.kept.dtype))

    def of(self, blocks: Sequence[int], tokens: int) -> Tensor:
        """[tokens, L, k] on the host: of the first tokens of a sequence with these blocks."""
        size = self.kept.shape[1]
        found = self.kept.index_select(0, to_device(ints(blocks), self.kept.device))
        return found.flatten(0, 1)[: min(tokens, len(blocks) * size)].cpu()

    @property
    def _flat(self) -> Tensor:
        return self.kept.view(-1, *self.kept.shape[2:])
