"""AdamW on what one rank of a tensor group holds."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from reinforge.backends.megatron.model import MegatronModel
from reinforge.backends.optimizer import MasterOptimizer
from reinforge.config.optimizer import OptimizerConfig


class GroupOptimizer(MasterOptimizer):
    """AdamW on what one rank of a tensor group holds. `MegatronWorker` makes it and steps it.

    The gradient is added up over ranks before the step, and its norm is that of the whole model.
    """

    def __init__(self, model: MegatronModel, cfg: OptimizerConfig):
        super().__init__(model.module, cfg)
        self.group = model.group
        self.copies = model.copies
        self.cut = model.cut_over_group
        self.summed = model.summed_over_group

    def reduce(self) -> None:
        """Once per optimizer step.

        Ranks have gradients of the same parameters: each computes something in every pass.
        """
        self.adding.settle()
        for name, master in self.masters.items():
            if master.grad is None:
                continue
            if name not in self.cut:
                dist.all_reduce(master.grad, group=self.group)
                # each rank has all of it, but for rounding, which must not drive the copies apart
                if name not in self.summed:
                    master.grad /= self.group.size()
            dist.all_reduce(master.grad, group=self.copies)

    def gradient_norm(self) -> Tensor:
        grads = {name: m.grad for name, m in self.masters.items() if m.grad is not None}
        if not grads:
            return torch.zeros(())
        squares = {name: grad.float().pow(2).sum() for name, grad in grads.items()}
        pieces = torch.stack([s for name, s in squares.items() if name in self.cut])
        dist.all_reduce(total := pieces.sum(), group=self.group)
        return (
            torch.stack([total, *(s for name, s in squares.items() if name not in self.cut)])
            .sum()
            .sqrt()
        )
