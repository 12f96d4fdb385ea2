"""An even load without a loss: a number for every expert is added to its score when experts are
chosen, and not when they are weighed (2408.15664; DeepSeek-V3, 2412.19437, section 2.1.2).

After an update it rises by a fixed rate for every expert that got fewer tokens than the mean of its
block, and falls for those that got more. It is no parameter: no gradient reaches it.

Legend: L blocks of experts, E experts of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reinforge.core.errors import InputError
from reinforge.models.packed import PackedModel
from reinforge.models.routing import Routers

KEY = "train.router_bias_rate"
BIASES = "router_bias/"  # the names of what they are in a checkpoint begin so
NAMES = ("e_score_correction_bias", "expert_bias")


@dataclass(slots=True)
class BlockBias:
    """The bias of one block."""

    name: str  # in the module
    used: Tensor  # [E] that the block adds, in the precision of the model
    exact: Tensor  # [E] float32, which small steps do not vanish in
    tokens: Tensor  # [E] float64: how many it got since the last update


class RouterBias:
    """The biases of one model. A backend counts and moves them; they are a part of its state."""

    def __init__(self, blocks: list[BlockBias], rate: float):
        self.blocks = blocks
        self.rate = rate

    @classmethod
    def of(cls, model: PackedModel, routers: Routers | None, rate: float) -> RouterBias | None:
        """None: nobody wants them moved."""
        if not rate:
            return None
        found = {**dict(model.module.named_parameters()), **dict(model.module.named_buffers())}
        biases = [(name, x) for name, x in found.items() if name.rpartition(".")[2] in NAMES]
        if routers is None or len(biases) != len(routers.choices):
            raise InputError(
                f"the routers of {type(model.plain).__name__} have no bias by which they choose.",
                where=KEY,
                fix="Leave it out; train.router_aux_loss balances the load of any router.",
            )
        return cls(
            [
                BlockBias(
                    name,
                    used.detach(),
                    used.detach().float().clone(),
                    torch.zeros(used.shape, dtype=torch.float64, device=used.device),
                )
                for name, used in biases
            ],
            rate,
        )

    def count(self, routers: Routers) -> None:
        """The tokens of the forward that the routers have seen."""
        for block, choice in zip(self.blocks, routers.choices, strict=True):
            if choice.taken is not None:
                block.tokens += choice.counts()

    @torch.no_grad()
    def step(self, *, move: bool = True) -> None:
        """After an update; `move`: whether there was one."""
        for block in self.blocks:
            if move:
                block.exact += self.rate * (block.tokens.mean() - block.tokens).sign().float()
                block.used.copy_(block.exact)
            block.tokens.zero_()

    def tensors(self) -> dict[str, Tensor]:
        return {block.name: block.exact for block in self.blocks}

    @torch.no_grad()
    def load(self, saved: dict[str, Tensor]) -> None:
        for block in self.blocks:
            if block.name in saved:
                block.exact.copy_(saved[block.name])
                block.used.copy_(block.exact)
