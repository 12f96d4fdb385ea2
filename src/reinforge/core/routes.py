"""Which experts a mixture sent the tokens of a sequence to: [T, L, k], for every token the k
experts that each of its L blocks took.

A sample carries them in its extras, one number of a byte each where there are fewer than 255
experts. OPEN: not known, the model may choose for itself.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

NAME = "routes"  # among the extras of a sample
OPEN = -1


@dataclass(frozen=True, slots=True)
class RoutedLayers:
    """The layers of a mixture that are blocks of experts: what a server that tells of all its
    layers is asked for. `models.routing.routed_layers` finds them.
    """

    layers: tuple[int, ...]
    experts: int

    def of(self, routes: Tensor) -> Tensor:
        """[T, L, k] of [T, all layers, k]."""
        return narrow(routes[:, list(self.layers)], self.experts)


def narrow(routes: Tensor, experts: int) -> Tensor:
    """As small as the number of experts allows."""
    if experts < 255:
        return routes.to(torch.uint8)  # OPEN becomes 255
    return routes.to(torch.int16)


def wide(routes: Tensor) -> Tensor:
    """int64, OPEN where it is not known."""
    found = routes.to(torch.int64)
    return found.masked_fill(found == 255, OPEN) if routes.dtype == torch.uint8 else found


def opened(routes: Tensor, tokens: int) -> Tensor:
    """[tokens, L, k] of the same kind, all of it OPEN."""
    return torch.full((tokens, *routes.shape[1:]), OPEN, dtype=torch.int16).to(routes.dtype)


def padded(routes: Tensor, tokens: int) -> Tensor:
    """The same with OPEN behind it, up to so many tokens."""
    return torch.cat([routes, opened(routes, tokens - len(routes))])


def joined(pieces: Sequence[tuple[Tensor | None, int, int]]) -> Tensor | None:
    """The tokens [start, stop) of several sequences end to end, OPEN where a sequence has none;
    None where all have none.
    """
    example = next((routes for routes, _, _ in pieces if routes is not None), None)
    if example is None:
        return None
    return torch.cat(
        [
            opened(example, stop - start) if routes is None else routes[start:stop]
            for routes, start, stop in pieces
        ]
    )


def to_json(routes: Tensor | None) -> list[Any] | None:
    """Shape, kind and bytes, as JSON has them."""
    if routes is None:
        return None
    array = routes.numpy()
    return [list(array.shape), array.dtype.str, base64.b64encode(array.tobytes()).decode("ascii")]


def from_json(saved: Sequence[Any] | None) -> Tensor | None:
    """What `to_json` wrote."""
    if saved is None:
        return None
    shape, kind, text = saved
    found = np.frombuffer(base64.b64decode(text), dtype=np.dtype(kind)).reshape(shape)
    return torch.from_numpy(found.copy())
