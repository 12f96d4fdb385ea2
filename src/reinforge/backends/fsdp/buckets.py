"""Whole weights from the shards of all ranks, many at a time: one transfer for each bucket, in the
precision in which the weights are wanted.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# its name since torch 2.13, and before
gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
BUCKET = 512 << 20  # bytes of weights that are gathered at once


def in_buckets(
    kinds: Mapping[str, Hashable], sizes: Mapping[str, int], most: int = BUCKET
) -> Iterator[list[str]]:
    """Names of the same kind together, in order, until they have `most` bytes.

    >>> list(in_buckets({"a": 0, "b": 1, "c": 0, "d": 0}, {"a": 6, "b": 1, "c": 6, "d": 1}, 10))
    [['a', 'c'], ['b'], ['d']]
    """
    waiting: dict[Hashable, list[str]] = {}
    for name, kind in kinds.items():
        bucket = waiting.setdefault(kind, [])
        bucket.append(name)
        if sum(sizes[n] for n in bucket) >= most:
            yield waiting.pop(kind)
    yield from waiting.values()


def gather_rows(
    pieces: Sequence[Tensor], shapes: Sequence[Sequence[int]], group: dist.ProcessGroup
) -> list[Tensor]:
    """The tensors of these shapes, on every rank of the group. A rank has as `pieces` its rows of
    each, as `torch.chunk` cuts them.
    """
    size = dist.get_world_size(group)
    rows = [-(-shape[0] // size) for shape in shapes]  # of a whole chunk: the last may be shorter
    sizes = [n * math.prod(shape[1:]) for n, shape in zip(rows, shapes, strict=True)]
    own = torch.zeros(sum(sizes), dtype=pieces[0].dtype, device=pieces[0].device)
    for piece, room in zip(pieces, own.split(sizes), strict=True):
        room[: piece.numel()].copy_(piece.reshape(-1))
    gathered = own.new_empty(size, len(own))
    # bytes: every transport knows them
    gather(gathered.view(-1).view(torch.uint8), own.view(torch.uint8), group=group)
    return [
        part.reshape(size * n, *shape[1:])[: shape[0]]
        for part, n, shape in zip(gathered.split(sizes, 1), rows, shapes, strict=True)
    ]
