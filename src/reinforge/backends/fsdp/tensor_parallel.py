"""Matrices of a layer cut over the ranks of a tensor group, as the plan says that transformers
gives an architecture (`base_model_tp_plan`), by torch's DTensor. A column-wise matrix computes a
part of the heads or of the inner width, and the row-wise one after it adds the parts up: one sum
over the group each way per attention and per MLP.
"""

from __future__ import annotations

import re

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from reinforge.core.errors import InputError
from reinforge.models.adapters import is_adapted
from reinforge.models.packed import PackedModel

# every rank has the whole weight and sees a part of the heads: gradients are added
SUMMED = "replicated_with_grad_allreduce"
# the dimension of the weight
CUT = {"colwise": 0, "colwise_gather_output": 0, "rowwise": 1, "rowwise_split_input": 1}


def _style(name: str) -> ParallelStyle:
    return {
        "colwise": lambda: ColwiseParallel(),
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
        "rowwise": lambda: RowwiseParallel(),
        "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    }[name]()


class TensorParallelPlan:
    """Which modules of a model are cut over the `ranks` of a tensor group, and how, as transformers
    plans it. `FsdpWorker` makes it, cuts the model by it and puts whole tensors together again.
    """

    def __init__(self, model: PackedModel, ranks: int):
        self.ranks = ranks
        self.styles = self._styles(model)  # by name in model.module
        self.summed = {
            f"{name}.{p}"
            for name, part in model.module.named_modules()
            if self.styles.get(name) == SUMMED
            for p, _ in part.named_parameters(recurse=False)
        }
        self.dims: dict[str, int] = {}  # of each parameter that is cut, the dimension
        for name, part in model.module.named_modules():
            if (style := self.styles.get(name)) in CUT:
                self.dims[f"{name}.weight"] = CUT[style]
                if part.bias is not None and CUT[style] == 0:
                    self.dims[f"{name}.bias"] = 0
        self._check(model)

    def _styles(self, model: PackedModel) -> dict[str, str]:
        plan = getattr(model.config, "base_model_tp_plan", None)
        kind = type(model.plain).__name__
        if not plan:
            raise InputError(
                f"transformers has no plan for cutting the matrices of {kind}.",
                where="train.tensor_parallel",
                fix="Set it to 1; train.ranks still divides the weights.",
            )
        if is_adapted(model.module):
            raise InputError(
                "the matrices of an adapter are not cut.",
                where="train.tensor_parallel",
                fix="Set it to 1, or train all weights.",
            )
        patterns = [
            (re.compile(re.escape(key).replace(r"\*", r"\d+")), style)
            for key, style in plan.items()
        ]
        own = (name for name, _ in model.trunk.named_parameters() if name.endswith(".sinks"))
        if (sinks := next(own, None)) is not None:
            raise InputError(
                f"{sinks} of {kind} has a number for each head, and is not cut as heads are.",
                where="train.tensor_parallel",
                fix="Set it to 1; train.ranks still divides the weights.",
            )
        prefix = next(name for name, part in model.module.named_modules() if part is model.trunk)
        found = {}
        for name, part in model.trunk.named_modules():
            style = next((style for pattern, style in patterns if pattern.fullmatch(name)), None)
            # the ends of the model are cut into shards, and whole while they compute
            if style is None or isinstance(part, nn.Embedding):
                continue
            if style != SUMMED and (style not in CUT or type(part) is not nn.Linear):
                raise InputError(
                    f"the plan of {kind} cuts {name} in the way {style}, which is not supported.",
                    where="train.tensor_parallel",
                    fix="Set it to 1; train.ranks still divides the weights.",
                )
            found[f"{prefix}.{name}" if prefix else name] = style
        return found

    def _check(self, model: PackedModel) -> None:
        heads = model.config.num_attention_heads
        keys = (
            getattr(model.config, "num_key_value_heads", None) or model.config.num_attention_heads
        )
        own = dict(model.module.named_parameters())
        odd = next(
            (name for name, dim in self.dims.items() if own[name].shape[dim] % self.ranks), None
        )
        if heads % self.ranks or keys % self.ranks or odd:
            what = (
                f"{odd} of size {own[odd].shape[self.dims[odd]]}"
                if odd
                else f"{heads} query and {keys} key heads"
            )
            raise InputError(
                f"{what} cannot be cut into {self.ranks} equal parts.",
                where="train.tensor_parallel",
                fix=f"Set it to a number that divides them, at most {keys}.",
            )

    def cut(self, module: nn.Module, within: nn.Module, mesh: DeviceMesh) -> None:
        """Cuts what the plan says inside `within`, a part of the model `module`.

        What is trained is float32 from now on.
        """
        inside = {id(part) for part in within.modules()}
        for name, part in module.named_modules():
            style = self.styles.get(name)
            if style in CUT and id(part) in inside:
                for p in part.parameters():
                    if p.requires_grad:
                        p.data = p.data.to(torch.float32)
                parallelize_module(part, mesh, _style(style), src_data_rank=None)
