"""Gradients of weights in 16 bits, added up in float32 over the micro-batches of a step."""

from __future__ import annotations

from torch import Tensor

from reinforge.models.attention import HAS_TRITON

MOST_WAITING = 1 << 28  # bytes


class GradientSums:
    """Adds gradients to their sums; on a GPU many at once, since starting a kernel for each of
    hundreds takes longer than what it does. `MasterOptimizer` makes one, adds to it as gradients
    appear, and asks for `settle` before it reads a sum.

    Every sum has the bits of adding each part by itself: a total has one part waiting at a time.
    """

    def __init__(self, at_once: bool | None = None) -> None:
        """`at_once`: many by one kernel, wherever their numbers allow; None: on a GPU."""
        self.at_once = at_once
        self._totals: dict[int, Tensor] = {}  # by id
        self._parts: list[Tensor] = []
        self._bytes = 0

    def add(self, total: Tensor, part: Tensor) -> None:
        if not self._takes(total, part):
            self.settle()
            total.add_(part)
            return
        if id(total) in self._totals or (self._parts and self._parts[0].dtype != part.dtype):
            self.settle()
        self._totals[id(total)] = total
        self._parts.append(part)
        self._bytes += part.nbytes
        if self._bytes >= MOST_WAITING:
            self.settle()

    def _takes(self, total: Tensor, part: Tensor) -> bool:
        asked = part.is_cuda and HAS_TRITON if self.at_once is None else self.at_once
        if not asked:
            return False
        from reinforge.models.kernels.add_up import can_add

        return can_add(total, part)

    def settle(self) -> None:
        """Adds what waits."""
        if self._parts:
            from reinforge.models.kernels.add_up import add_up

            add_up(list(self._totals.values()), self._parts)
            self.forget()

    def forget(self) -> None:
        """What waits is not added."""
        self._totals.clear()
        self._parts.clear()
        self._bytes = 0
