"""How a run divides its ranks: size = data_parallel x sequence x tensor, the last one innermost.

The ranks that work on the same packs are a model-parallel group: each computes a slice of every
pack (train.sequence_parallel) or a part of every matrix product (train.tensor_parallel). Weights
are cut over data_parallel x sequence, and over tensor where the plan of the architecture says so.
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
class ParallelLayout:
    """Sizes of the parallel dimensions of a backend on ranks. The driver on rank 0 and the worker
    on every rank make the same one from the config.
    """

    size: int
    sequence: int = 1
    tensor: int = 1

    @classmethod
    def of(cls, cfg: TrainConfig, size: int) -> ParallelLayout:
        layout = cls(size, cfg.sequence_parallel, cfg.tensor_parallel)
        if size % layout.members:
            parts = [
                name for name in ("sequence_parallel", "tensor_parallel") if getattr(cfg, name) > 1
            ]
            raise InputError(
                f"{size} ranks do not divide into groups of {layout.members}.",
                where=f"train.{parts[0]}",
                fix=(
                    f"Use a number of ranks that {' x '.join(parts)} = {layout.members} divides,"
                    " or a smaller group."
                ),
            )
        return layout

    @property
    def members(self) -> int:
        """Ranks of a model-parallel group."""
        return self.sequence * self.tensor

    @property
    def data_parallel(self) -> int:
        """How many groups there are; each gets packs of its own."""
        return self.size // self.members

    @property
    def shards(self) -> int:
        """Shards that a matrix, or its part of a tensor group, is cut into."""
        return self.size // self.tensor

    def spread(self, by_group: Sequence[T]) -> list[T]:
        """For each rank what its group gets."""
        return [by_group[rank // self.members] for rank in range(self.size)]

    def first(self, by_rank: Sequence[T]) -> list[T]:
        """Of each group what its first rank found: the others found the same."""
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
