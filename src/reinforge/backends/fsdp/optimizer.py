"""An optimizer on the shards of a model. What it and the averages see are plain tensors: the shards
themselves.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from reinforge.backends.fsdp.tensor_parallel import TensorParallelPlan
from reinforge.backends.gradient_sums import GradientSums
from reinforge.backends.optimizer import MasterOptimizer, host_copy
from reinforge.config.optimizer import OptimizerConfig


class ShardedOptimizer(MasterOptimizer):
    """An optimizer on this rank's shards of the weights. `FsdpWorker` makes it and steps it.

    `parameters` are plain float32 tensors that share their memory with what is sharded; what is
    `whole` is the same on every rank and counts once. `mesh` is that of the shards; with a `plan`
    there are as many of them as `tensor_mesh` has ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        cfg: OptimizerConfig,
        stored: Mapping[str, torch.dtype],
        mesh: DeviceMesh,
        plan: TensorParallelPlan | None = None,
        tensor_mesh: DeviceMesh | None = None,
    ):
        self.mesh = mesh
        self.plan = plan
        self.tensor_mesh = tensor_mesh
        self.sharded = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.whole = {name for name, p in self.sharded.items() if not isinstance(p, DTensor)}
        self.stored = stored  # in which precision a checkpoint holds the weights
        self.parameters = {
            name: p._local_tensor if isinstance(p, DTensor) else p.data
            for name, p in self.sharded.items()
        }
        self.offload = cfg.offload
        self.sums = {}
        self.adding = GradientSums()  # nothing waits in it: `collect` adds at once
        self.masters = (
            {name: host_copy(p) for name, p in self.parameters.items()}
            if cfg.offload
            else dict(self.parameters)
        )
        self._start(cfg)

    def collect(self) -> None:
        """Puts the gradients that a pass left where the optimizer looks for them.

        Those of whole parameters are summed here.
        """
        for name, p in self.sharded.items():
            if p.grad is None:
                continue
            if name in self.whole:
                dist.all_reduce(p.grad, group=self.mesh.get_group())
            piece = p.grad._local_tensor if isinstance(p.grad, DTensor) else p.grad
            if self.plan is not None and self.tensor_mesh is not None and name in self.plan.summed:
                dist.all_reduce(piece, group=self.tensor_mesh.get_group())
            if name in self.sums:
                self.sums[name].add_(piece)
            else:
                self.sums[name] = piece
            p.grad = None
        if not self.offload:
            for name, total in self.sums.items():
                self.masters[name].grad = total

    def gradient_norm(self) -> Tensor:
        """Over all shards of all ranks."""
        grads = {
            name: self.sums[name]
            for name in self.masters
            if name in self.sums and self._counts(name)
        }
        device = next(iter(self.parameters.values())).device
        norms = (
            [n.double().to(device) for n in torch._foreach_norm(list(grads.values()))]
            if grads
            else []
        )
        total = (
            torch.stack(norms).square().sum()
            if norms
            else torch.zeros((), dtype=torch.float64, device=device)
        )
        dist.all_reduce(total)
        return total.sqrt().float()

    def _counts(self, name: str) -> bool:
        """Of what several ranks have, one counts."""
        first = self.tensor_mesh is None or self.tensor_mesh.get_local_rank() == 0
        cut = self.plan is not None and name in self.plan.dims
        return (cut or first) and (name not in self.whole or self.mesh.get_local_rank() == 0)

    def zero(self) -> None:
        super().zero()
        for p in self.sharded.values():
            p.grad = None

    def tensors(self) -> dict[str, Tensor]:
        masters = {
            f"{name}/master": master
            for name, master in self.masters.items()
            if self.stored[name] != torch.float32
        }
        return {**super().tensors(), **masters}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for name, p in self.parameters.items():
            if f"{name}/master" in tensors:
                p.copy_(tensors[f"{name}/master"])
        super().load(tensors)
