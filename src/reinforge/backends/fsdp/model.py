"""A model cut into as many pieces as there are ranks (FSDP2, `fully_shard`), and what works on the
pieces: the optimizer and the reference.

A piece is float32 and is its own master: a pass gathers the weights layer by layer, in the model's
precision, and gradients come back summed over ranks in float32. What the optimizer and the averages
see are plain tensors, the pieces themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from reinforge.backends.fsdp.tensor_parallel import Plan
from reinforge.backends.optimizer import MasterAdamW, host_copy
from reinforge.backends.reference import Reference
from reinforge.config.algorithm import ReferenceConfig
from reinforge.config.train import OptimizerConfig
from reinforge.core.batch import Batch
from reinforge.models.causal import CausalModel
from reinforge.models.packed import PackedModel


class Root(nn.Module):
    """Runs a piece of work inside a module, because gathering hangs on a module's call: our forward
    calls trunk and head by themselves.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, work: Callable[[], Any]) -> Any:
        return work()


def shard(
    model: PackedModel,
    mesh: DeviceMesh,
    device: torch.device,
    plan: Plan | None = None,
    tensor_mesh: DeviceMesh | None = None,
    offload: bool = False,
) -> FSDPModule:
    """Cuts the model in place, layer by layer, so that no more than one whole layer is on the
    device at once. A value head is small and must not be rounded: it stays whole on every rank.
    With a `plan` matrices are first cut over `tensor_mesh`. `offload`: the pieces lie in host
    memory, and their gradients go there.
    """
    dtype = model.dtype
    whole = set() if model.value_head is None else set(model.value_head.parameters())
    for p in whole:
        p.data = p.data.to(device)
    policy = MixedPrecisionPolicy(
        None if dtype == torch.float32 else dtype, torch.float32, cast_forward_inputs=False
    )
    root = Root(model.module)
    for part in (*model.layers, root):
        if plan is not None and tensor_mesh is not None and part is not root:
            plan.cut(model.module, part, tensor_mesh)
        for p in part.parameters():
            if p.requires_grad and not isinstance(p, DTensor) and p not in whole:
                p.data = p.data.float()
        home = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
        fully_shard(
            part,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=part is not root,
            ignored_params=whole,
            offload_policy=home,
        )
    for part in root.modules():
        # losses are divided by global counts, so gradients are added and not averaged
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    assert isinstance(root, FSDPModule)
    return root


class ShardedAdamW(MasterAdamW):
    """AdamW on the pieces.

    `parameters` are plain float32 tensors that share their memory with what is sharded; what is
    `whole` is the same on every rank and counts once. `mesh` is that of the pieces; with a `plan`
    there are as many of them as `tensor_mesh` has ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        cfg: OptimizerConfig,
        stored: Mapping[str, torch.dtype],
        mesh: DeviceMesh,
        plan: Plan | None = None,
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
        """Over all pieces of all ranks."""
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


class ShardedReference(Reference):
    """The copy is cut as the model is; it was made before that.

    `root` is that of the copy, or without one the policy's own.
    """

    def __init__(
        self,
        model: CausalModel,
        optimizer: ShardedAdamW,
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
