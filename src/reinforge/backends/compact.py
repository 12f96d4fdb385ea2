"""An optimizer in less memory: masters split into the weight and what is left, moments in 8 bits,
gradients added up in bfloat16, each by itself or together (about 8 bytes a weight, of 18).

Every tensor is updated in chunks: what a step allocates does not grow with the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from reinforge.backends.block_codes import BLOCK, decoded, dither, encoded, scales
from reinforge.backends.gradient_sums import GradientSums
from reinforge.backends.optimizer import MasterOptimizer
from reinforge.backends.optimizer_state import MASTER, refuse_other
from reinforge.backends.split_master import BITS, joined, split, tie_bytes
from reinforge.backends.update_rules import (
    ADAMW,
    RATIO,
    check_groups,
    lion_update,
    parameter_groups,
)
from reinforge.config.optimizer import LION_BETAS, OptimizerConfig

CHUNK = 1 << 23  # numbers; a multiple of BLOCK
SCALE = "_scale"  # of a moment in 8 bits: the largest number of each block
MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # in 8 bits: whether with a sign
assert CHUNK % BLOCK == 0 and CHUNK % BITS == 0


class SplitMasters(Mapping[str, Tensor]):
    """The float32 masters by name. Those that are split are put together when they are asked for,
    and nothing is kept. `CompactOptimizer` makes it.
    """

    def __init__(self, parameters: Mapping[str, Tensor], wide: Mapping[str, Tensor]):
        self.parameters = parameters
        self.wide = wide
        split_ones = {name: p for name, p in parameters.items() if name not in wide}
        self.rests = {
            name: torch.zeros(p.numel(), dtype=torch.int16, device=p.device)
            for name, p in split_ones.items()
        }
        self.ties = {
            name: torch.zeros(tie_bytes(p.numel()), dtype=torch.uint8, device=p.device)
            for name, p in split_ones.items()
        }

    def __iter__(self) -> Iterator[str]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)

    def __getitem__(self, name: str) -> Tensor:
        if name in self.wide:
            return self.wide[name]
        weight = self.parameters[name].detach()
        return joined(weight.view(-1), self.rests[name], self.ties[name]).view(weight.shape)

    def at_home(self, name: str) -> Tensor:
        """For a checkpoint: put together in host memory."""
        if name in self.wide:
            return self.wide[name]
        weight = self.parameters[name].detach().cpu()
        found = joined(weight.view(-1), self.rests[name].cpu(), self.ties[name].cpu())
        return found.view(weight.shape)

    def chunk(self, name: str, here: slice) -> Tensor:
        """The masters of a part of a flat tensor."""
        if name in self.wide:
            return self.wide[name].detach().view(-1)[here]
        weight = self.parameters[name].detach().view(-1)[here]
        return joined(weight, self.rests[name][here], self.ties[name][_bytes(here)])

    def put(self, name: str, here: slice, master: Tensor) -> None:
        """New masters of a part, and with them the weights."""
        weights = self.parameters[name].detach().view(-1)[here]
        if name not in self.wide:
            weight, rest, ties = split(master)
            weights.copy_(weight)
            self.rests[name][here] = rest
            self.ties[name][_bytes(here)] = ties
            return
        wide = self.wide[name].detach().view(-1)[here]
        if wide.data_ptr() != master.data_ptr():
            wide.copy_(master)
        if weights.data_ptr() != wide.data_ptr():
            weights.copy_(wide)


def _bytes(here: slice) -> slice:
    return slice(here.start // BITS, tie_bytes(here.stop))


class CompactOptimizer(MasterOptimizer):
    """AdamW or Lion with masters, moments and gradients in fewer bytes. The local backend makes it
    where the section asks for `masters: split`, `gradients: bfloat16` or `adamw_8bit`.

    With split masters alone every bit is that of float32 masters: the same kernel updates what was
    put together.
    """

    masters: SplitMasters  # type: ignore[assignment]

    def __init__(self, module: nn.Module, cfg: OptimizerConfig):
        self.cfg = cfg
        self.offload = False
        self.narrow = cfg.gradients == "bfloat16"
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        check_groups(self.parameters, cfg)
        wide = {
            name: p if p.dtype == torch.float32 else p.detach().float().clone()
            for name, p in self.parameters.items()
            if cfg.masters == "float32" or p.dtype != torch.bfloat16
        }
        self.masters = SplitMasters(self.parameters, wide)
        self.sums = {}  # of the gradients, where they are not the weights' own
        self.adding = GradientSums()
        for name, p in self.parameters.items():
            if not self._own_gradient(p):
                p.register_post_accumulate_grad_hook(self._into_sums(name))
        groups = parameter_groups(self.parameters, cfg)
        self.settings: dict[str, dict[str, Any]] = {
            name: next(g for g in groups if any(p is one for one in g["params"]))
            for name, p in self.parameters.items()
        }
        self.updates = []
        self.kept: dict[str, dict[str, Tensor]] = {}  # of each parameter that was updated

    def _own_gradient(self, p: Tensor) -> bool:
        """Whether micro-batches are added up in the gradient that autograd keeps."""
        return p.dtype == torch.float32 or (self.narrow and p.dtype == torch.bfloat16)

    def _gradient(self, name: str) -> Tensor | None:
        p = self.parameters[name]
        return p.grad if self._own_gradient(p) else self.sums.get(name)

    def gradients(self) -> list[Tensor]:
        self.adding.settle()
        found = (self._gradient(name) for name in self.parameters)
        return [grad for grad in found if grad is not None]

    def gradient_norm(self) -> Tensor:
        """Squares of bfloat16 are added up in float32."""
        grads = self.gradients()
        if not self.narrow or not grads:
            return super().gradient_norm()
        return torch.linalg.vector_norm(
            torch.stack(torch._foreach_norm(grads, 2.0, dtype=torch.float32))
        )

    @torch.no_grad()
    def step(self, rate: float, scale: float) -> None:
        self.adding.settle()
        for name, p in self.parameters.items():
            grad = self._gradient(name)
            if grad is None:
                continue
            kept = self.kept.setdefault(name, {}) or self._begun(name)
            if "step" in kept:
                kept["step"] += 1
            flat = grad.contiguous().view(-1)
            count = int(kept["step"]) if self._eight_bit else 0
            for begin in range(0, p.numel(), CHUNK):
                here = slice(begin, min(begin + CHUNK, p.numel()))
                part = flat[here].float()
                self._update(name, here, part if scale == 1.0 else part * scale, rate, count)

    @property
    def _eight_bit(self) -> bool:
        return self.cfg.name == "adamw_8bit"

    def _begun(self, name: str) -> dict[str, Tensor]:
        """Moments of 0, as they are before the first update."""
        p = self.parameters[name]
        names = ("exp_avg",) if self.cfg.name == "lion" else tuple(MOMENTS)
        if self._eight_bit:
            for key in names:
                codes, largest = encoded(
                    torch.zeros(1, device=p.device), signed=MOMENTS[key], between=0.5
                )
                self.kept[name][key] = codes.expand(p.numel()).clone().view(p.shape)
                self.kept[name][key + SCALE] = largest.expand(scales(p.numel())).clone()
        else:
            for key in names:
                self.kept[name][key] = torch.zeros_like(p, dtype=torch.float32)
        if self.cfg.name != "lion":
            self.kept[name]["step"] = torch.zeros((), device=p.device)
        return self.kept[name]

    def _update(self, name: str, here: slice, grad: Tensor, rate: float, count: int) -> None:
        kept = self.kept[name]
        group = self.settings[name]
        master = self.masters.chunk(name, here)
        moments = [self._moment(kept, key, here) for key in MOMENTS if key in kept]
        if self.cfg.name == "lion":
            lion_update(
                master,
                grad,
                moments[0],
                rate=rate * group[RATIO],
                betas=tuple(self.cfg.options.get("betas", LION_BETAS)),
                decay=group["weight_decay"],
            )
        else:
            # torch's kernel, which the optimizer with float32 masters calls too
            torch._fused_adamw_(
                [master],
                [grad],
                [moments[0]],
                [moments[1]],
                [],
                [kept["step"]],
                lr=rate * group[RATIO],
                beta1=self.cfg.betas[0],
                beta2=self.cfg.betas[1],
                weight_decay=group["weight_decay"],
                eps=self.cfg.eps,
                amsgrad=False,
                maximize=False,
            )
        self.masters.put(name, here, master)
        if self._eight_bit:
            between = dither(here.start, here.stop - here.start, count, grad.device)
            _put_codes(kept, "exp_avg", here, moments[0], between)
            _put_codes(kept, "exp_avg_sq", here, moments[1], 1 - 2.0**-24 - between)

    def _moment(self, kept: Mapping[str, Tensor], key: str, here: slice) -> Tensor:
        """In float32; of 8 bits a copy."""
        flat = kept[key].view(-1)[here]
        if not self._eight_bit:
            return flat
        return decoded(flat, kept[key + SCALE][_blocks(here)], signed=MOMENTS[key])

    def zero(self) -> None:
        self.adding.forget()
        self.sums.clear()
        for p in self.parameters.values():
            p.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """As without compact forms, but for moments in 8 bits: masters in float32."""
        out = {}
        for name, p in self.parameters.items():
            if p.dtype != torch.float32:
                out[f"{name}/{MASTER}"] = self.masters.at_home(name)
            for key, value in self.kept.get(name, {}).items():
                out[f"{name}/{key}"] = value
        return out

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Float32 masters are split, and float32 moments of AdamW become 8 bits."""
        self.zero()
        self.kept.clear()
        keys: dict[str, list[str]] = {}
        for full in tensors:
            name, _, key = full.rpartition("/")
            if key != MASTER:
                keys.setdefault(name, []).append(key)
        for name, p in self.parameters.items():
            master = tensors.get(f"{name}/{MASTER}", p)
            for begin in range(0, p.numel(), CHUNK):
                here = slice(begin, min(begin + CHUNK, p.numel()))
                part = master.detach().reshape(-1)[here].to(p.device, torch.float32)
                self.masters.put(name, here, part)
            if name in keys:
                self._load_kept(name, {key: tensors[f"{name}/{key}"] for key in keys[name]})

    def _load_kept(self, name: str, saved: Mapping[str, Tensor]) -> None:
        known = [frozenset({"exp_avg"}) if self.cfg.name == "lion" else ADAMW]
        if self._eight_bit:
            known.append(ADAMW | {key + SCALE for key in MOMENTS})
        if frozenset(saved) not in known:
            refuse_other(self.cfg.name, name, list(saved), known)
        device = self.parameters[name].device
        self.kept[name] = {key: value.clone().to(device) for key, value in saved.items()}
        if self._eight_bit and frozenset(saved) == ADAMW:
            for key, signed in MOMENTS.items():
                flat = self.kept[name][key].view(-1)
                codes, largest = encoded(flat, signed=signed, between=0.5)
                self.kept[name][key] = codes.view(saved[key].shape)
                self.kept[name][key + SCALE] = largest


def _blocks(here: slice) -> slice:
    return slice(here.start // BLOCK, scales(here.stop))


def _put_codes(
    kept: Mapping[str, Tensor], key: str, here: slice, values: Tensor, between: Tensor
) -> None:
    codes, largest = encoded(values, signed=MOMENTS[key], between=between)
    kept[key].view(-1)[here] = codes
    kept[key + SCALE][_blocks(here)] = largest
