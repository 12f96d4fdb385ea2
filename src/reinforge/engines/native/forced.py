"""Tokens that are given, through the engine's own path: what it would have told of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reinforge.engines.native.decode_batch import DecodeBatch
from reinforge.models.causal import CausalModel


@dataclass(slots=True)
class ForcedRows(DecodeBatch):
    """Rows that draw what is given. `NativeEngine.forced` makes them; nothing is sampled."""

    given: Tensor | None = None  # [B, n] the tokens of each row

    def draw(self, model: CausalModel, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The next given tokens [B] and their log-probs [B]."""
        assert self.given is not None
        picked = self.given.gather(1, self.produced[:, None])[:, 0]
        heat = torch.where(self.temperatures == 0, 1.0, self.temperatures)
        z = model.logits(hidden) / heat[:, None]
        return picked, z.gather(-1, picked[:, None])[:, 0] - z.logsumexp(-1)
