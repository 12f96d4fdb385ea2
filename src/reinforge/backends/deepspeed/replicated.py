"""Stage 0 of ZeRO: nothing is cut. DeepSpeed adds gradients up, once per optimizer step, and calls
the optimizer, which every rank has whole.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from reinforge.backends.deepspeed.model import ZeroModel


class ReplicatedModel(ZeroModel):
    """One rank's whole model and optimizer. `DeepSpeedWorker` makes it in stage 0, for float32: the
    weights are their own masters.
    """

    @property
    def pieces(self) -> list[Tensor]:
        return list(self.parameters.values())

    def _norm(self) -> Tensor:
        """Of the sum over ranks, which DeepSpeed left in every rank's gradients."""
        return torch.nn.utils.get_total_norm(
            [p.grad for p in self.parameters.values() if p.grad is not None]
        )

    def update(self, rate: float, limit: float) -> float:
        if not self.pending:
            return 0.0
        self.adam.rate, self.adam.limit = rate, limit
        self.engine.step()
        self.pending = False
        return self.adam.seen if math.isfinite(self.adam.seen) else math.inf

    def master(self, name: str) -> Tensor:
        return self.parameters[name].detach()

    def moment(self, name: str, key: str) -> Tensor:
        found: Tensor = self.adam.state[self.parameters[name]][key]
        return found

    @torch.no_grad()
    def put(self, name: str, key: str, value: Tensor) -> None:
        place = self.master(name) if key == "master" else self.moment(name, key)
        place.copy_(value)
