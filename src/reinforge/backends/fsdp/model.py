"""A model cut into as many shards as there are ranks (FSDP2, `fully_shard`).

A shard is float32 and is its own master: a pass gathers the weights layer by layer, in the model's
precision, and gradients come back summed over ranks in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from reinforge.backends.fsdp.tensor_parallel import TensorParallelPlan
from reinforge.models.adapters import store_plainly
from reinforge.models.packed import PackedModel


class FsdpModule(nn.Module):
    """Runs work inside a module, because gathering hangs on a module's call: our forward
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
    plan: TensorParallelPlan | None = None,
    tensor_mesh: DeviceMesh | None = None,
    offload: bool = False,
) -> FSDPModule:
    """Cuts the model in place, layer by layer, so that no more than one whole layer is on the
    device at once. A value head is small and must not be rounded: it stays whole on every rank.
    With a `plan` matrices are first cut over `tensor_mesh`. `offload`: the shards lie in host
    memory, and their gradients go there.
    """
    dtype = model.dtype
    whole = set() if model.value_head is None else set(model.value_head.parameters())
    for p in whole:
        p.data = p.data.to(device)
    policy = MixedPrecisionPolicy(
        None if dtype == torch.float32 else dtype, torch.float32, cast_forward_inputs=False
    )
    store_plainly(model.module, device)
    root = FsdpModule(model.module)
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
    if offload:
        model.computes_on = device
    assert isinstance(root, FSDPModule)
    return root
