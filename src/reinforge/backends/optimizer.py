"""AdamW with float32 masters.

A bf16 weight at learning rate 1e-6 would round back to itself; its master does not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from reinforge.config.train import OptimizerConfig, ScheduleConfig

# of a group of parameters: its learning rate divided by that of the run
RATIO = "ratio"


def learning_rate(step: int, base: float, schedule: ScheduleConfig, total: int) -> float:
    """The rate of optimizer step `step` (from 0): linear warm-up, then constant, or down to
    floor·base at `total`.

    Warm-up ends at the whole rate in its last step, and never has a rate of 0: a first batch that
    teaches nothing would be a waste, most of all where it had to be sampled. After it the rates are
    those of transformers' schedules, step for step.
    """
    if step < schedule.warmup:
        return base * (step + 1) / schedule.warmup
    if schedule.kind == "constant":
        return base
    done = min(1.0, (step - schedule.warmup) / max(1, total - schedule.warmup))
    left = 1 - done if schedule.kind == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return base * (schedule.floor + (1 - schedule.floor) * left)


def parameter_groups(weights: Mapping[str, Tensor], cfg: OptimizerConfig) -> list[dict[str, Any]]:
    """What AdamW is given of the weights by name. Only matrices decay. With LoRA+ the matrices B of
    an adapter learn `lora_plus` times as fast as everything else (2402.12354): they begin at 0, A
    does not.
    """
    groups: dict[tuple[bool, float], dict[str, Any]] = {}
    for name, weight in weights.items():
        matrix = weight.ndim > 1
        faster = cfg.lora_plus is not None and ("lora_B" in name or "lora_embedding_B" in name)
        ratio = cfg.lora_plus if faster and cfg.lora_plus is not None else 1.0
        group = {
            "params": [],
            "weight_decay": cfg.weight_decay if matrix else 0.0,
            RATIO: ratio,
        }
        groups.setdefault((not matrix, ratio), group)["params"].append(weight)
    return [groups[key] for key in sorted(groups)]


def set_rate(adam: torch.optim.Optimizer, rate: float) -> None:
    """The rate of the next update: of each of the `parameter_groups`, times its ratio."""
    for group in adam.param_groups:
        group["lr"] = rate * group[RATIO]


class MasterAdamW:
    """AdamW with float32 master weights, for a model in any precision. The local backend makes it
    and steps it.

    Gradients of low-precision weights are added up in float32 as soon as they appear.

    With `offload` masters and moments are in host memory, and the update is done there: gradients
    are added up on the device, go over once per step, and the new weights come back.
    """

    def __init__(self, module: nn.Module, cfg: OptimizerConfig):
        self.parameters: dict[str, Tensor] = {
            name: p for name, p in module.named_parameters() if p.requires_grad
        }
        self.masters: dict[str, Tensor] = {}
        # offload: gradients on the device; otherwise they are the masters' own
        self.sums: dict[str, Tensor] = {}
        self.offload = cfg.offload
        for name, p in self.parameters.items():
            if cfg.offload:
                self.masters[name] = host_copy(p)
                p.register_post_accumulate_grad_hook(self._into_sums(name))
            elif p.dtype == torch.float32:
                self.masters[name] = p
            else:
                self.masters[name] = p.detach().float().clone()
                p.register_post_accumulate_grad_hook(self._into(self.masters[name]))
        self._start(cfg)

    def _start(self, cfg: OptimizerConfig) -> None:
        self.adam = torch.optim.AdamW(
            parameter_groups(self.masters, cfg), lr=0.0, betas=cfg.betas, eps=cfg.eps, fused=True
        )

    @staticmethod
    def _into(master: Tensor):  # type: ignore[no-untyped-def]
        def add(p: Tensor) -> None:
            assert p.grad is not None
            if master.grad is None:
                master.grad = p.grad.float()
            else:
                master.grad.add_(p.grad)
            p.grad = None

        return add

    def _into_sums(self, name: str):  # type: ignore[no-untyped-def]
        def add(p: Tensor) -> None:
            assert p.grad is not None
            if name in self.sums:
                self.sums[name].add_(p.grad)
            else:
                self.sums[name] = p.grad.float()
            p.grad = None

        return add

    def gradients(self) -> list[Tensor]:
        """What was added up since `zero`, in float32, where the weights are, always in the same
        order: their norm is a sum.
        """
        found = (
            (self.sums.get(name) if self.offload else m.grad) for name, m in self.masters.items()
        )
        return [grad for grad in found if grad is not None]

    def gradient_norm(self) -> Tensor:
        grads = self.gradients()
        if not grads:
            return torch.zeros(())
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))

    def step(self, rate: float, scale: float) -> None:
        """One update with the gradient multiplied by `scale`."""
        if scale != 1.0:
            torch._foreach_mul_(self.gradients(), scale)
        if self.offload:
            self._fetch_gradients()
        set_rate(self.adam, rate)
        self.adam.step()
        with torch.no_grad():
            for name, p in self.parameters.items():
                # in float32 over the bus and rounded there: from pinned memory, one after the other
                if self.masters[name] is not p:
                    p.copy_(self.masters[name].to(p.device, non_blocking=True))

    def _fetch_gradients(self) -> None:
        """Sums into the masters' gradients: all copies are queued, then waited for once."""
        for name, total in self.sums.items():
            self.masters[name].grad = torch.empty_like(
                self.masters[name], pin_memory=total.is_cuda
            ).copy_(total, non_blocking=True)
        if any(total.is_cuda for total in self.sums.values()):
            torch.cuda.synchronize()

    def zero(self) -> None:
        self.sums.clear()
        for name, master in self.masters.items():
            self.parameters[name].grad = master.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """Moments, step counts and masters by parameter name."""
        out = {}
        for name, master in self.masters.items():
            # a float32 weight is its own master, or equal to it
            if self.parameters[name].dtype != torch.float32:
                out[f"{name}/master"] = master
            for key, value in self.adam.state.get(master, {}).items():
                out[f"{name}/{key}"] = value
        return out

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.zero()
        self.adam.state.clear()
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                master.copy_(tensors.get(f"{name}/master", self.parameters[name]))
            state = {
                key: tensors[f"{name}/{key}"]
                for key in ("exp_avg", "exp_avg_sq", "step")
                if f"{name}/{key}" in tensors
            }
            if state:
                self.adam.state[master] = {
                    k: v.clone().to(master.device if k != "step" or master.is_cuda else "cpu")
                    for k, v in state.items()
                }


def host_copy(p: Tensor) -> Tensor:
    """A float32 copy in host memory, pinned where the weight is on a GPU."""
    return torch.empty(p.shape, dtype=torch.float32, pin_memory=p.is_cuda).copy_(p.detach())
