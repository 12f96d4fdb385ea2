"""Gated MLPs of long packs, a tile of tokens after the other.

An MLP is wide: of a token of a 7B model its gate, its up and their product are 15 times as much as
the token's hidden state. With gradient checkpointing one layer is there in whole at a time, and of
a row of 256k tokens that alone would be 30 GB forward and as much backward. An MLP computes every
token by itself, so it can go through the pack in tiles, each of which is computed again in its own
backward pass: a third forward of the MLP, where attention over such lengths is what takes the time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from reinforge.core import mlp_tiles

PARTS = ("gate_proj", "up_proj", "down_proj")


class TiledMlp:
    """The forward of an MLP, in tiles where the pack is long. `tile_mlps` makes one per MLP."""

    def __init__(self, plain: Callable[[Tensor], Tensor]):
        self.plain = plain
        self.again = False  # the layer is computed again in the backward pass

    def forward(self, x: Tensor) -> Tensor:
        gradients = torch.is_grad_enabled()
        # a compiler would make a case of the length
        if torch.compiler.is_compiling() or not mlp_tiles.in_tiles(x.shape[-2]):
            return self.plain(x)
        if gradients and not self.again:
            return self.plain(x)
        tiles = x.split(mlp_tiles.TILE, -2)
        if not gradients:
            return torch.cat([self.plain(tile) for tile in tiles], -2)
        # an MLP that is trained draws no random numbers in its forward
        kept: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        return torch.cat([checkpoint(self.plain, tile, **kept) for tile in tiles], -2)


def tile_mlps(module: nn.Module, again: bool) -> None:
    """Lets the gated MLPs of a module, whatever computes them otherwise, go through long packs in
    tiles. `again`: its layers are computed again in the backward pass. `PackedModel.hidden` calls
    it before a long pack.
    """
    for part in module.modules():
        if not all(isinstance(getattr(part, name, None), nn.Module) for name in PARTS):
            continue
        found = tiled(part)
        if found is None:
            found = TiledMlp(part.forward)
            part.forward = found.forward  # type: ignore[method-assign]
        found.again = again


def tiled(part: nn.Module) -> TiledMlp | None:
    """What computes this MLP in tiles, if something does."""
    found = getattr(vars(part).get("forward"), "__self__", None)
    return found if isinstance(found, TiledMlp) else None
