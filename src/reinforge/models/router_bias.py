"""An even load without a loss: a number for every expert is added to its score when experts are
chosen, and not when they are weighed (2408.15664; DeepSeek-V3, 2412.19437, section 2.1.2).

After an update it rises by a fixed rate for every expert that got fewer tokens than the mean of its
block, and falls for those that got more. It is no parameter: no gradient reaches it.

Legend: L blocks of experts, E experts of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

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
        return cls._found(model, routers, rate) if rate else None

    @classmethod
    def kept(
        cls, model: PackedModel, routers: Routers | None, saved: Mapping[str, Tensor]
    ) -> RouterBias | None:
        """Those that another run moved before, and that stay as they are now; None: there are
        none.
        """
        return cls._found(model, routers, 0.0) if saved else None

    @classmethod
    def _found(cls, model: PackedModel, routers: Routers | None, rate: float) -> RouterBias:
        biases = list(biases_of(model.module))
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

    def forget(self) -> None:
        """What was counted since the last update: the forwards are done again."""
        for block in self.blocks:
            block.tokens.zero_()

    def add_up(self) -> None:
        """All ranks at once: each knows the tokens of all of them afterwards."""
        for block in self.blocks:
            dist.all_reduce(block.tokens)

    @torch.no_grad()
    def step(self, *, move: bool = True) -> None:
        """After an update; `move`: whether there was one."""
        for block in self.blocks:
            if move:
                block.exact += self.rate * (block.tokens.mean() - block.tokens).sign().float()
                block.used.copy_(block.exact)
        self.forget()

    @torch.no_grad()
    def publish(self, module: nn.Module) -> None:
        """Into another copy of the model."""
        theirs = dict(biases_of(module))
        for block in self.blocks:
            theirs[block.name].copy_(block.used)

    def tensors(self) -> dict[str, Tensor]:
        return {block.name: block.exact for block in self.blocks}

    @torch.no_grad()
    def load(self, saved: Mapping[str, Tensor]) -> None:
        for block in self.blocks:
            if block.name in saved:
                block.exact.copy_(saved[block.name])
                block.used.copy_(block.exact)


def biases_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Of every block that has one: its name and the tensor itself, a parameter or a buffer."""
    for found in (module.named_parameters(), module.named_buffers()):
        yield from ((name, x) for name, x in found if name.rpartition(".")[2] in NAMES)


def keep_whole(module: nn.Module) -> None:
    """Biases that are parameters become buffers of the same names, which neither FSDP nor ZeRO
    cuts over ranks. For a model that is about to be cut.
    """
    for name, bias in [*biases_of(module)]:
        owner, _, own = name.rpartition(".")
        part = module.get_submodule(owner)
        if own in part._parameters:
            delattr(part, own)
            part.register_buffer(own, bias.detach())
