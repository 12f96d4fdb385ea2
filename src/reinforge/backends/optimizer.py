"""AdamW with float32 masters. A bf16 weight at learning rate 1e-6 would round back to itself; its master does not."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from reinforge.config.schema import OptimizerConfig, ScheduleConfig


def learning_rate(step: int, base: float, schedule: ScheduleConfig, total: int) -> float:
    """The rate of optimizer step `step` (from 0): linear warm-up, then constant, or down to floor·base at `total`."""
    if step < schedule.warmup:
        return base * (step + 1) / schedule.warmup
    if schedule.kind == "constant":
        return base
    done = min(1.0, (step - schedule.warmup) / max(1, total - schedule.warmup))
    left = 1 - done if schedule.kind == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return base * (schedule.floor + (1 - schedule.floor) * left)


class MasterAdamW:
    """Decay only on matrices. Gradients of low-precision weights are added up in float32 as soon as they appear."""

    def __init__(self, module: nn.Module, cfg: OptimizerConfig):
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.masters: dict[str, Tensor] = {}
        for name, p in self.parameters.items():
            if p.dtype == torch.float32:
                self.masters[name] = p
            else:
                self.masters[name] = p.detach().float().clone()
                p.register_post_accumulate_grad_hook(self._into(self.masters[name]))
        matrices = [m for m in self.masters.values() if m.ndim > 1]
        vectors = [m for m in self.masters.values() if m.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": cfg.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.adam = torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=cfg.betas, eps=cfg.eps, fused=True)

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

    def gradient_norm(self) -> Tensor:
        grads = [m.grad for m in self.masters.values() if m.grad is not None]
        if not grads:
            return torch.zeros(())
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))

    def step(self, rate: float, scale: float) -> None:
        """One update with the gradient multiplied by `scale`."""
        grads = [m.grad for m in self.masters.values() if m.grad is not None]
        if scale != 1.0:
            torch._foreach_mul_(grads, scale)
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        with torch.no_grad():
            for name, p in self.parameters.items():
                if self.masters[name] is not p:
                    p.copy_(self.masters[name])

    def zero(self) -> None:
        for master in self.masters.values():
            master.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """Moments, step counts and masters by parameter name."""
        out = {}
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                out[f"{name}/master"] = master
            for key, value in self.adam.state.get(master, {}).items():
                out[f"{name}/{key}"] = value
        return out

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        self.zero()
        self.adam.state.clear()
        for name, master in self.masters.items():
            if f"{name}/master" in tensors:
                master.copy_(tensors[f"{name}/master"])
            state = {key: tensors[f"{name}/{key}"] for key in ("exp_avg", "exp_avg_sq", "step") if f"{name}/{key}" in tensors}
            if state:
                self.adam.state[master] = {
                    k: v.clone().to(master.device if k != "step" or master.is_cuda else "cpu") for k, v in state.items()
                }
