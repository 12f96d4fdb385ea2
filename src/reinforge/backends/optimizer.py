"""An optimizer with float32 masters.

A bf16 weight at learning rate 1e-6 would round back to itself; its master does not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from reinforge.backends.gradient_sums import GradientSums
from reinforge.backends.optimizer_state import kept_of, load_kept
from reinforge.backends.update_rules import make_updates, set_rate
from reinforge.config.optimizer import OptimizerConfig
from reinforge.config.train import ScheduleConfig


def learning_rate(step: int, base: float, schedule: ScheduleConfig, total: int) -> float:
    """The rate of optimizer step `step` (from 0): linear warm-up over some steps or a share of
    `total`, then constant, or down to floor·base at `total`.

    Warm-up ends at the whole rate in its last step, and never has a rate of 0: a first batch that
    teaches nothing would be a waste, most of all where it had to be sampled. After it the rates are
    those of transformers' schedules, step for step.
    """
    asked = schedule.warmup
    warmup = math.ceil(asked * total) if isinstance(asked, float) else asked
    if step < warmup:
        return base * (step + 1) / warmup
    if schedule.kind == "constant":
        return base
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    left = 1 - done if schedule.kind == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return base * (schedule.floor + (1 - schedule.floor) * left)


class MasterOptimizer:
    """An optimizer (`train.optimizer.name`) on float32 master weights, for a model in any
    precision. The local backend makes it and steps it.

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
        self.adding = GradientSums()
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
        # by torch's classes; several where a weight's kind decides, none for a frozen model
        self.updates: list[Optimizer] = make_updates(self.masters, cfg) if self.masters else []

    def _into(self, master: Tensor):  # type: ignore[no-untyped-def]
        def add(p: Tensor) -> None:
            assert p.grad is not None
            if master.grad is None:
                master.grad = p.grad.float()
            else:
                self.adding.add(master.grad, p.grad)
            p.grad = None

        return add

    def _into_sums(self, name: str):  # type: ignore[no-untyped-def]
        def add(p: Tensor) -> None:
            assert p.grad is not None
            if name in self.sums:
                self.adding.add(self.sums[name], p.grad)
            else:
                self.sums[name] = p.grad.float()
            p.grad = None

        return add

    def gradients(self) -> list[Tensor]:
        """What was added up since `zero`, in float32, where the weights are, always in the same
        order: their norm is a sum.
        """
        self.adding.settle()
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
        self.adding.settle()
        if scale != 1.0:
            torch._foreach_mul_(self.gradients(), scale)
        if self.offload:
            self._fetch_gradients()
        for update in self.updates:
            set_rate(update, rate)
            update.step()
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
        self.adding.forget()
        self.sums.clear()
        for name, master in self.masters.items():
            self.parameters[name].grad = master.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """Masters, and what the optimizer keeps, by parameter name."""
        out = {}
        for name, master in self.masters.items():
            # a float32 weight is its own master, or equal to it
            if self.parameters[name].dtype != torch.float32:
                out[f"{name}/master"] = master
        return out | kept_of(self.updates, self.masters)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.zero()
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                master.copy_(tensors.get(f"{name}/master", self.parameters[name]))
        load_kept(self.updates, self.masters, tensors)


def host_copy(p: Tensor) -> Tensor:
    """A float32 copy in host memory, pinned where the weight is on a GPU."""
    return torch.empty(p.shape, dtype=torch.float32, pin_memory=p.is_cuda).copy_(p.detach())
