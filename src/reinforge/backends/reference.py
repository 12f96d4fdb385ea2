"""The policy that a KL is measured against: the initial one, a copy of the trained one taken now
and then, or its moving average.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from reinforge.backends.ema import WeightAverage
from reinforge.backends.optimizer import MasterOptimizer
from reinforge.config.algorithm import ReferenceConfig
from reinforge.core.backend import State
from reinforge.core.batch import Batch
from reinforge.models.adapters import adapter_off, begins_as_base, is_adapted
from reinforge.models.causal import CausalModel
from reinforge.models.fused_linear import separate


class ReferencePolicy:
    """The policy that KL terms and preference losses compare with. It starts as the policy that the
    run starts from. A backend makes it and asks it for log-probs in `annotate`.

    With an adapter nothing of the base is copied. Frozen is then the adapter off where the adapter
    is new, and the adapter as it was loaded, put in the place of the trained one, where it is not.
    Moving is another adapter in its place. A moving reference (TR-DPO, 2404.09656) is a part of the
    run and in its checkpoints; a frozen one is made again from the model.
    """

    def __init__(self, model: CausalModel, optimizer: MasterOptimizer, cfg: ReferenceConfig):
        self.model = model
        self.cfg = cfg
        self.steps = 0  # optimizer steps since the run began
        adapted = is_adapted(model.module)
        # other weights for what is trained; None: there is a copy, or the adapter goes off
        self.average: WeightAverage | None = None
        if self.moving or (adapted and not begins_as_base(model.module)):
            self.average = WeightAverage(optimizer, cfg.decay if cfg.kind == "ema" else 0.0)
        self.copy: CausalModel | None = None
        if not adapted:
            self.copy = self._copied()
            self._refresh()

    def _copied(self) -> CausalModel:
        copied = CausalModel(
            copy.deepcopy(self.model.module).requires_grad_(False).eval(), exact=self.model.exact
        )
        copied.form = self.model.form
        if self.moving:  # it gets other tensors, of which a joint product would not know
            separate(copied.module)
        # a copy of a module does not keep that
        if any(layer._compiled_call_impl is not None for layer in self.model.layers):
            copied.compile_layers()
        return copied

    @property
    def moving(self) -> bool:
        return self.cfg.kind != "frozen"

    @torch.no_grad()
    def logprobs(self, batch: Batch, temperature: float) -> Tensor:
        """[M] of the trained tokens."""
        with self.active() as model:
            return model.logprobs(batch, temperature=temperature)[0]

    @contextmanager
    def active(self) -> Iterator[CausalModel]:
        """Inside, the model that is yielded computes as the reference: the copy, or the policy's
        own module with another adapter or none.
        """
        if self.copy is not None:
            yield self.copy
            return
        with adapter_off(self.model.module) if self.average is None else self.average.swapped():
            yield self.model

    def after_step(self) -> None:
        """Moves the reference after every `every`-th optimizer step."""
        self.steps += 1
        if self.moving and self.average is not None and self.steps % self.cfg.every == 0:
            self.average.after_step()
            self._refresh()

    @torch.no_grad()
    def _refresh(self) -> None:
        """The copy gets the moved values: those that have its type and place are its
        own storage.
        """
        if self.copy is None or self.average is None:
            return
        own = dict(self.copy.module.named_parameters())
        for name, value in self.average.values.items():
            if own[name].dtype == value.dtype and own[name].device == value.device:
                own[name].data = value
            else:
                own[name].copy_(value)

    def state(self) -> State:
        moved = self.average.state().tensors if self.moving and self.average is not None else {}
        return State(moved, {"steps": self.steps})

    def load(self, state: State) -> None:
        self.steps = state.meta["steps"]
        if self.moving and self.average is not None:
            self.average.load(state)
            self._refresh()


class FrozenReference(ReferencePolicy):
    """A reference that never moves: the model with its adapter off, or a copy that was made before
    the model was cut. Workers on ranks make it.
    """

    def __init__(self, model: CausalModel, cfg: ReferenceConfig, copied: CausalModel | None):
        assert cfg.kind == "frozen", "the config refuses it"
        self.model = model
        self.cfg = cfg
        self.copy = copied
        self.average = None
        self.steps = 0
