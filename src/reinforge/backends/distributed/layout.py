"""How the ranks of a run stand: size = hands x sequence x tensor, the last one innermost.

A hand is the ranks that work on the same packs: each computes a slice of every pack
(train.sequence_parallel) or a part of every matrix product (train.tensor_parallel). Weights are cut
over hands x sequence, and over tensor where the plan of the architecture says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from reinforge.config.train import TrainConfig
from reinforge.core.errors import InputError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Grid:
    size: int
    sequence: int = 1
    tensor: int = 1

    @classmethod
    def of(cls, cfg: TrainConfig, size: int) -> Grid:
        grid = cls(size, cfg.sequence_parallel, cfg.tensor_parallel)
        if size % grid.members:
            parts = [
                name for name in ("sequence_parallel", "tensor_parallel") if getattr(cfg, name) > 1
            ]
            raise InputError(
                f"{size} ranks do not divide into groups of {grid.members}.",
                where=f"train.{parts[0]}",
                fix=(
                    f"Use a number of ranks that {' x '.join(parts)} = {grid.members} divides, or a"
                    " smaller group."
                ),
            )
        return grid

    @property
    def members(self) -> int:
        """Ranks of a hand."""
        return self.sequence * self.tensor

    @property
    def hands(self) -> int:
        return self.size // self.members

    @property
    def shards(self) -> int:
        """Pieces that a matrix, or its part of a tensor group, is cut into."""
        return self.size // self.tensor

    def spread(self, by_hand: Sequence[T]) -> list[T]:
        """For each rank what its hand gets."""
        return [by_hand[rank // self.members] for rank in range(self.size)]

    def first(self, by_rank: Sequence[T]) -> list[T]:
        """Of each hand what its first rank found: the others found the same."""
        return list(by_rank[:: self.members])

    def piece(self, tensor: Tensor, rank: int, dim: int | None) -> Tensor:
        """What `rank` holds of a tensor: its part of the tensor group's cut along `dim` (None: all
        of it), cut again along the first dimension; the last ranks have less or nothing.
        """
        if dim is not None and self.tensor > 1:
            tensor = tensor.chunk(self.tensor, dim)[rank % self.tensor]
        parts = tensor.chunk(self.shards)
        place = rank // self.tensor
        return parts[place] if place < len(parts) else tensor[:0]

    def box(self, shape: Sequence[int], rank: int, dim: int | None) -> tuple[tuple[int, int], ...]:
        """Where `piece` lies in the whole: [begin, end) of each dimension."""
        spans = [(0, n) for n in shape]
        if dim is not None and self.tensor > 1:
            spans[dim] = _part((0, shape[dim]), self.tensor, rank % self.tensor)
        spans[0] = _part(spans[0], self.shards, rank // self.tensor)
        return tuple(spans)


def _part(span: tuple[int, int], parts: int, place: int) -> tuple[int, int]:
    """As torch.chunk cuts."""
    begin, end = span
    size = -(-(end - begin) // parts)
    return min(begin + place * size, end), min(begin + (place + 1) * size, end)
