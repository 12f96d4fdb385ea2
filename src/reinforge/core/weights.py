"""How a trainer hands weights to an engine.

`shared` means that both run the same module and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Weights:
    """The newest weights of a backend, for an engine. `Backend.weights` makes it after every
    update, `Engine.update` takes it.
    """

    kind: Literal["shared", "full", "adapter"]
    module: nn.Module | None = None  # shared: the very module that trains
    # otherwise (HF name, tensor) pairs
    buckets: Callable[[], Iterator[tuple[str, Tensor]]] | None = None
    fingerprint: str = ""  # of the values, so that a receiver can prove what it got
    # the trainer's own log-probs of some tokens: a receiver must find the same
    probe: Callable[[Sequence[int]], Tensor] | None = None
    # whether every rank that generates with a copy of the model has put them into it
    kept: bool = False
