"""Stage 1 of ZeRO in bfloat16, for which DeepSpeed has an optimizer of its own: masters and moments
are cut, and every rank adds up the gradients of all weights in float32.
"""

from __future__ import annotations

from torch import Tensor

from reinforge.backends.deepspeed.model import ZeroModel


class LowPrecisionModel(ZeroModel):
    """One rank's whole weights and gradients, and its part of masters and moments.
    `DeepSpeedWorker` makes it in stage 1 for weights in bfloat16.
    """

    @property
    def pieces(self) -> list[Tensor]:
        found: list[Tensor] = self.zero.fp32_groups_flat_partition
        return found

    def update(self, rate: float, limit: float) -> float:
        # DeepSpeed takes the norm over weights that had a gradient on this rank, and ranks must
        # agree on it: where one has none, what the others had is there all the same
        flags = self.zero.fp32_groups_has_gradients
        self.zero.fp32_groups_has_gradients = [[True] * len(group) for group in flags]
        return super().update(rate, limit)

    def _clear_spent(self, applied: bool) -> None:
        """DeepSpeed does it itself."""
