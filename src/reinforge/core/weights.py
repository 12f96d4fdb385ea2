"""How a trainer hands weights to an engine.

`shared` means that both run the same module and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class ProbeScores:
    """The trainer's log-probs of the probe of one update, and of the next one: what an engine must
    find after it. The trainer's actor computes it for engines that are elsewhere;
    `engines/served/transfer.py` compares with it.
    """

    number: int  # of the probe: a new one for every update
    want: Tensor  # [T] what the trainer says about it
    # what it says about the next one: what an engine that keeps these weights will find
    ahead: Tensor


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
    # the same, computed before they were sent: for a receiver that cannot ask the trainer
    scores: ProbeScores | None = None
    # adapter: what it is added to
    base: Weights | None = None
