"""The reference of a model in shards, which is cut as the model is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FSDPModule,
)
from torch.distributed.tensor import DTensor

from reinforge.backends.fsdp.optimizer import ShardedOptimizer
from reinforge.backends.reference import ReferencePolicy
from reinforge.config.algorithm import ReferenceConfig
from reinforge.core.batch import Batch
from reinforge.models.causal import CausalModel


def twin_of(module: nn.Module) -> nn.Module:
    """A copy of the module that does not train, whose parameters lie where the module's do.

    Every rank has the whole model in host memory before it is cut: a second one on each would be
    140 GB a rank for 70B. `cut_apart` gives the twin shards of its own.
    """
    same = {id(p): nn.Parameter(p.data, requires_grad=False) for p in module.parameters()}
    return copy.deepcopy(module, same).requires_grad_(False).eval()


def cut_apart(twin: CausalModel, cut: Callable[[CausalModel], FSDPModule]) -> FSDPModule:
    """Cuts a twin: a shard is a copy, and what stays whole becomes one."""
    root = cut(twin)
    for p in twin.module.parameters():
        if not isinstance(p, DTensor):
            p.data = p.data.clone()
    return root


class ShardedReference(ReferencePolicy):
    """The reference policy of a model that is sharded. `FsdpWorker` makes it. Where it is a copy,
    that was made before the model was cut, and is cut in the same way.

    `root` is that of the copy, or without one the policy's own.
    """

    def __init__(
        self,
        model: CausalModel,
        optimizer: ShardedOptimizer,
        cfg: ReferenceConfig,
        copied: CausalModel | None,
        root: FSDPModule,
    ):
        self.root = root
        self._made = copied
        super().__init__(model, optimizer, cfg)

    def _copied(self) -> CausalModel:
        assert self._made is not None
        return self._made

    @torch.no_grad()
    def logprobs(self, batch: Batch, temperature: float) -> Tensor:
        """[M].

        What is swapped in is there before weights are gathered, and what was gathered is dropped
        before it is swapped out.
        """
        with self.active() as model:
            found: Tensor = self.root(partial(model.logprobs, batch, temperature=temperature))[0]
            self.root.reshard()
        return found

    @torch.no_grad()
    def _refresh(self) -> None:
        if self.copy is None or self.average is None:
            return
        for name, p in self.copy.module.named_parameters():
            if name in self.average.values and isinstance(p, DTensor):
                p._local_tensor.copy_(self.average.values[name])
