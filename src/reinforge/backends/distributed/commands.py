"""How commands reach the ranks and answers come back: by a tree of two levels.

Ranks are in blocks, and the first of a block speaks for it. Rank 0 talks to those and to its own
block, instead of to everybody: with 1,024 ranks to 62 others.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

BLOCK = 16  # ranks that are one block, where there are few; a node or two
FILES = 1 << 16  # more would make programs slow that close all they might have
LAZY = "TORCH_GLOO_LAZY_INIT"  # gloo connects two ranks when they first talk, and not all to all


class CommandTree:
    """One rank's place in the tree. Every rank makes it at the same moment, and every rank takes
    part in `scatter` and `gather`. `RankMember` has one.
    """

    def __init__(self, rank: int, size: int, timeout: timedelta):
        self.rank = rank
        width = max(BLOCK, math.isqrt(size - 1) + 1)
        self.blocks = [list(range(i, min(i + width, size))) for i in range(0, size, width)]
        self.block = self.blocks[rank // width]
        self.head = self.block[0]
        heads = [block[0] for block in self.blocks]
        self._heads = dist.new_group(heads, timeout, "gloo") if len(heads) > 1 else None
        groups = [dist.new_group(block, timeout, "gloo") for block in self.blocks]
        self._own = groups[rank // width]

    def scatter(self, messages: Sequence[bytes] | None) -> bytes:
        """This rank's message; rank 0 has those of all."""
        own: list[Any] = [None]
        parcels = None
        if messages is not None:
            parcels = [[messages[rank] for rank in block] for block in self.blocks]
            own = parcels[:1]
        if self._heads is not None and self.rank == self.head:
            dist.scatter_object_list(own, parcels, src=0, group=self._heads)
        found: list[Any] = [None]
        dist.scatter_object_list(found, own[0], src=self.head, group=self._own)
        message: bytes = found[0]
        return message

    def gather(self, answer: bytes) -> list[bytes]:
        """The answers of all ranks, at rank 0; none at the others."""
        block: list[Any] = [None] * len(self.block)
        first = self.rank == self.head
        dist.gather_object(answer, block if first else None, dst=self.head, group=self._own)
        if self.rank and not (first and self._heads is not None):
            return []
        blocks: list[Any] = [block]
        if self._heads is not None:
            blocks = [None] * len(self.blocks)
            dist.gather_object(block, None if self.rank else blocks, dst=0, group=self._heads)
        return [] if self.rank else [found for part in blocks for found in part]


def raise_file_limit() -> int:
    """Lets this process open up to `FILES` files and sockets, or what the system allows. The usual
    1,024 is less than the connections of rank 0's store with as many ranks.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted
