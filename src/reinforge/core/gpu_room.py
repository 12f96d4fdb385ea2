"""What trainers tell of their GPUs to the servers that share them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias


class GpuRoom(NamedTuple):
    """What is free of one trainer's GPU once its allocator keeps nothing that it does not use.
    `build/shared_gpus.py` asks every rank for it; `ServedEngine` holds it against what its servers
    need to wake up.
    """

    rank: int
    gpu: str  # as CUDA_VISIBLE_DEVICES calls it
    free: int  # bytes


# Empties the allocators of all trainers and tells what is free then, rank by rank.
Release: TypeAlias = Callable[[], Sequence[GpuRoom]]


def nothing_to_release() -> list[GpuRoom]:
    """Nobody trains where the servers are."""
    return []
