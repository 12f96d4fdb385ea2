"""Tiles of queries and keys, on which exact attention works: here (`exact_attention`) and on a GPU
(`kernels.exact`).

A tile of queries is P neighbouring positions of one segment times the G query heads of a key head.
P is a power of two that divides the tile of keys and tiles begin at multiples of P, so all queries
of a tile need the same tiles of keys. In a decode step a tile holds one position, its other rows
are empty. A `TilePlan` says where queries and keys of the tiles lie; T tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reinforge.models.attention import Segments

# a tile on a CPU (more queries where more heads share a key head)
QUERIES = 8
KEYS = 64
GPU_QUERIES = 64  # a tile on a GPU: what one warp group multiplies at once
# keys of a chunk on a GPU: each has a softmax of its own, and chunks are joined in order
CHUNK = 1024
# a decode step of fewer programs leaves multiprocessors idle; one of more keys is waited for
FEW_PROGRAMS = 264
MANY_KEYS = 8192


@dataclass(slots=True)
class TilePlan:
    """[T] int32 each, on the device: a query at position p of tile t is row base + p of q, if low
    <= p < high; key number i is row keys + i of k, or, where there are block tables, wherever line
    t of them says.
    """

    first: Tensor  # the tile's first position
    base: Tensor
    low: Tensor
    high: Tensor
    keys: Tensor
    positions: int  # P


def tile_shape(groups: int, on_gpu: bool) -> tuple[int, int]:
    """(rows of a tile, P): functions of the model alone."""
    rows = GPU_QUERIES if on_gpu else QUERIES
    while rows < groups:
        rows *= 2
    return rows, min(KEYS, 1 << ((rows // groups).bit_length() - 1))


def chunk_programs(rows: int, kv_heads: int, longest: int) -> int:
    """How many programs share the keys of a sequence in a decode step on a GPU, one for each chunk,
    where no sequence has more than `longest`.
    """
    enough = rows * kv_heads >= FEW_PROGRAMS and longest <= MANY_KEYS
    if enough or longest <= CHUNK:
        return 1
    return 1 << (-(-longest // CHUNK) - 1).bit_length()


def plan_segments(segments: Segments, positions: int) -> TilePlan:
    tiles: list[tuple[int, int, int, int, int]] = []
    start = key_start = 0
    for n, n_keys in zip(segments.lengths, segments.key_lengths, strict=True):
        before = n_keys - n  # tokens that this segment continues
        tiles += [
            (p, start - before, before, n_keys, key_start)
            for p in range(before // positions * positions, n_keys, positions)
        ]
        start = start + n
        key_start = key_start + n_keys
    first, base, low, high, keys = (
        torch.tensor(tiles, dtype=torch.int32)
        .reshape(-1, 5)
        .t()
        .contiguous()
        .to(segments.starts.device)
        .unbind(0)
    )
    return TilePlan(first, base, low, high, keys, positions)


def plan_paged(cached: Tensor) -> TilePlan:
    """One position for each sequence; on a GPU the kernel finds the rest of it by itself."""
    if cached.is_cuda:
        return TilePlan(cached, cached, cached, cached, cached, 1)
    now = cached.to(torch.int32)
    row = torch.arange(len(now), dtype=torch.int32, device=now.device)
    return TilePlan(now, row - now, now, now + 1, row, 1)
