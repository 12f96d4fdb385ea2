"""Trainers and servers take turns with the memory of the GPUs that they share."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from reinforge.core.errors import InputError
from reinforge.core.gpu_room import Release

GIB = 1 << 30
SLACK = 256 << 20  # bytes that a driver may want in one moment and not in another


class MemoryTurns:
    """Sees to it that servers find the memory again that they gave back. `ServedEngine` has one: it
    falls asleep and wakes all its servers through it.
    """

    def __init__(self, release: Release):
        self.release = release
        self.given: list[int] = []  # bytes by trainer, in the order of `release`

    async def give(self, falling_asleep: Coroutine[Any, Any, None]) -> None:
        """The servers' turn ends: what they give back is counted."""
        before = await asyncio.to_thread(self.release)
        await falling_asleep
        after = await asyncio.to_thread(self.release)
        self.given = [now.free - then.free for then, now in zip(before, after, strict=True)]

    async def take(self) -> None:
        """The trainers' turn ends: their allocators are emptied, on all ranks, and the servers can
        wake up.
        """
        room = await asyncio.to_thread(self.release)
        for found, given in zip(room, self.given, strict=False):
            if found.free + SLACK < given:
                raise InputError(
                    f"the server on GPU {found.gpu} gave back {given / GIB:.1f} GiB when it fell"
                    f" asleep, and rank {found.rank} leaves {found.free / GIB:.1f} GiB: the weights"
                    " and the optimizer of training stay.",
                    where="engine.memory",
                    fix="Lower it, train on more ranks, or set train.optimizer.offload=true.",
                )
