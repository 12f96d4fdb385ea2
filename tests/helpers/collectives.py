"""What reaches a rank from the others, counted by whoever asks on that rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# of c10d: which argument a collective writes what it received to
RECEIVED = ("_allgather_base", "allgather", "broadcast", "scatter", "allreduce", "recv")


class ReceivedBytes(TorchDispatchMode):
    """Bytes that collectives leave on this rank, whoever asks for them in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.gathers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func)
        if "_c10d_functional.all_gather" in name:
            self._count(out)
            self.gathers += 1
        elif name.startswith(tuple(f"c10d.{kind}" for kind in RECEIVED)):
            self._count(args[0])
            self.gathers += "allgather" in name
        return out

    def _count(self, found: Any) -> None:
        if isinstance(found, torch.Tensor):
            self.bytes += found.numel() * found.element_size()
        else:
            for each in found:
                self._count(each)


class RankTraffic:
    """All that a rank other than 0 receives, commands included, from when it is made: such a rank
    works in one thread. Made with `Ranks.make`.
    """

    def __init__(self, member: Any):
        self.rank = member.rank
        self.mode = ReceivedBytes()
        if self.rank:
            self.mode.__enter__()

    def received(self) -> int:
        """Since it was asked last."""
        found = self.mode.bytes
        self.mode.bytes = 0
        return found

    def end(self) -> None:
        if self.rank:
            self.mode.__exit__(None, None, None)


class ProofCount:
    """How often models are proved on a rank, from when it is made. Made with `Ranks.make`."""

    def __init__(self, member: Any):
        from reinforge.models import proof

        self.count = 0
        self.prove = proof.prove
        proof.prove = self._counted

    def _counted(self, *args: Any) -> float:
        self.count += 1
        return self.prove(*args)

    def proofs(self) -> int:
        return self.count

    def end(self) -> None:
        from reinforge.models import proof

        proof.prove = self.prove


@contextmanager
def counted(ranks: Any, kind: Any) -> Iterator[int]:
    """An object of this kind on every rank while the block lasts; its number."""
    number = ranks.make(kind, [()] * ranks.size)
    try:
        yield number
    finally:
        ranks.call(number, "end")
        ranks.drop(number)
