"""A moving average of the trained weights, in float32: for evaluation and export, and as a
reference that follows the policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from reinforge.backends.optimizer import MasterOptimizer
from reinforge.core.backend import State


class WeightAverage:
    """A moving average of the weights: average <- decay * average + (1 - decay) * weights; decay 0
    is a copy. A backend makes it for `train.ema` and for a reference that moves, and updates it
    after every step.

    It follows the float32 masters, where they are, and is a part of the run: a resumed one
    continues it bit for bit.
    """

    def __init__(self, optimizer: MasterOptimizer, decay: float):
        assert 0 <= decay <= 1
        self.optimizer = optimizer
        self.decay = decay
        self.values = {name: master.detach().clone() for name, master in optimizer.masters.items()}

    @torch.no_grad()
    def after_step(self) -> None:
        values = list(self.values.values())
        masters = [self.optimizer.masters[name].detach() for name in self.values]
        if self.decay == 0:
            torch._foreach_copy_(values, masters)
        else:
            torch._foreach_lerp_(values, masters, 1 - self.decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside, the model computes with the average; afterwards with its own weights again, bit
        for bit. Values move and storage stays, so that what remembers addresses (CUDA graphs) sees
        it. Nothing may train or be saved inside.
        """
        self._swap(into=True)
        try:
            yield
        finally:
            self._swap(into=False)

    @torch.no_grad()
    def _swap(self, *, into: bool) -> None:
        for name, p in self.optimizer.parameters.items():
            master = self.optimizer.masters[name]
            value = self.values[name]
            if master is p:  # its own master: the two change places
                kept = p.detach().clone()
                p.copy_(value)
                value.copy_(kept)
            else:
                p.copy_(value if into else master)

    def state(self) -> State:
        return State(dict(self.values))

    @torch.no_grad()
    def load(self, state: State) -> None:
        assert state.tensors.keys() == self.values.keys(), "the average of another model"
        for name, value in self.values.items():
            value.copy_(state.tensors[name])
