"""Optimizers by name: torch's own where it has them, Lion, and a class of the user's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from reinforge.config.optimizer import LION_BETAS, OptimizerConfig
from reinforge.core.errors import InputError
from reinforge.core.user_files import load_attribute
from reinforge.models.freezing import matches

# of a group of parameters: its learning rate divided by that of the run
RATIO = "ratio"
NAME = "train.optimizer.name"
ADAMW = frozenset({"step", "exp_avg", "exp_avg_sq"})


class Lion(Optimizer):
    """Lion (2302.06675): a step by the sign of an interpolation between momentum and gradient.
    `make_updates` makes it for `train.optimizer.name: lion`.

        c = beta1 m + (1 - beta1) g
        w <- w - rate (sign(c) + decay w)
        m <- beta2 m + (1 - beta2) g
    """

    def __init__(self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = LION_BETAS):
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["exp_avg"] = torch.zeros_like(weight)
                lion_update(
                    weight,
                    weight.grad,
                    state["exp_avg"],
                    rate=group["lr"],
                    betas=group["betas"],
                    decay=group["weight_decay"],
                )


def lion_update(
    weight: Tensor,
    grad: Tensor,
    momentum: Tensor,
    *,
    rate: float,
    betas: tuple[float, float],
    decay: float,
) -> None:
    """One update of Lion, in place."""
    direction = torch.lerp(grad, momentum, betas[0]).sign_()
    weight.mul_(1 - rate * decay).add_(direction, alpha=-rate)
    momentum.lerp_(grad, 1 - betas[1])


# which tensors each of them keeps of a parameter
KEPT: dict[type[Optimizer], tuple[frozenset[str], ...]] = {
    torch.optim.AdamW: (ADAMW,),
    torch.optim.Muon: (frozenset({"momentum_buffer"}),),
    Lion: (frozenset({"exp_avg"}),),
    torch.optim.Adafactor: (
        frozenset({"step", "row_var", "col_var"}),
        frozenset({"step", "variance"}),
    ),
}


def make_updates(weights: Mapping[str, Tensor], cfg: OptimizerConfig) -> list[Optimizer]:
    """What updates the weights, by name, from their gradients: one optimizer, or for Muon one for
    the matrices of layers and AdamW for all else.
    """
    check_groups(weights, cfg)
    if cfg.own:
        return [_own(weights, cfg)]
    return OPTIMIZERS[cfg.name](weights, cfg)


def _adamw(weights: Mapping[str, Tensor], cfg: OptimizerConfig) -> list[Optimizer]:
    groups = parameter_groups(weights, cfg)
    return [torch.optim.AdamW(groups, lr=0.0, betas=cfg.betas, eps=cfg.eps, fused=True)]


def _muon(weights: Mapping[str, Tensor], cfg: OptimizerConfig) -> list[Optimizer]:
    """With the factor of 2502.16982 on its rate, so that one learning rate is right for both."""
    matrices = {name: w for name, w in weights.items() if by_muon(name, w)}
    others = {name: w for name, w in weights.items() if name not in matrices}
    found: list[Optimizer] = []
    if matrices:
        options = {"adjust_lr_fn": "match_rms_adamw", **cfg.options}
        groups = parameter_groups(matrices, cfg)
        found.append(
            _called(
                lambda: torch.optim.Muon(groups, lr=0.0, weight_decay=cfg.weight_decay, **options),
                cfg,
            )
        )
    return found + (_adamw(others, cfg) if others else [])


def by_muon(name: str, weight: Tensor) -> bool:
    """Whether a weight is a matrix of a layer: the names of what is in one have its number.
    Embeddings, heads, vectors and the stacked matrices of experts are AdamW's.

    >>> by_muon("model.layers.3.mlp.up_proj.weight", torch.zeros(4, 2))
    True
    >>> by_muon("lm_head.weight", torch.zeros(4, 2))
    False
    """
    numbered = any(part.isdigit() for part in name.split("."))
    return numbered and weight.ndim == 2 and min(weight.shape) > 1


def _lion(weights: Mapping[str, Tensor], cfg: OptimizerConfig) -> list[Optimizer]:
    groups = parameter_groups(weights, cfg)
    return [_called(lambda: Lion(groups, lr=0.0, **cfg.options), cfg)]


def _adafactor(weights: Mapping[str, Tensor], cfg: OptimizerConfig) -> list[Optimizer]:
    """Tensor by tensor: the lists of torch's other path hold temporaries of the whole model."""
    groups = parameter_groups(weights, cfg)
    return [
        _called(lambda: torch.optim.Adafactor(groups, lr=0.0, foreach=False, **cfg.options), cfg)
    ]


OPTIMIZERS: dict[str, Callable[[Mapping[str, Tensor], OptimizerConfig], list[Optimizer]]] = {
    "adamw": _adamw,
    "muon": _muon,
    "lion": _lion,
    "adafactor": _adafactor,
}


def _own(weights: Mapping[str, Tensor], cfg: OptimizerConfig) -> Optimizer:
    make = load_attribute(cfg.name, NAME, "class")
    groups = parameter_groups(weights, cfg)
    # the rate is set before every step; some refuse 0
    made = _called(lambda: make(groups, lr=1.0, **cfg.options), cfg)
    if not isinstance(made, Optimizer):
        raise InputError(
            f"{cfg.name} makes a {type(made).__name__}, which is no torch.optim.Optimizer.",
            where=NAME,
            fix="Name a class that is called as (groups of parameters, lr=...).",
        )
    return made


def _called(make: Callable[[], Any], cfg: OptimizerConfig) -> Any:
    try:
        return make()
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{cfg.name} cannot be made with these settings: {error}.",
            where="train.optimizer.options",
            fix="Give what it takes beside parameters and learning rate.",
        ) from error


def parameter_groups(weights: Mapping[str, Tensor], cfg: OptimizerConfig) -> list[dict[str, Any]]:
    """What an optimizer is given of the weights by name. Only matrices decay. With LoRA+ the
    matrices B of an adapter learn `lora_plus` times as fast as everything else (2402.12354): they
    begin at 0, A does not. A group of `train.optimizer.groups` goes before both.
    """
    groups: dict[tuple[bool, float, float], dict[str, Any]] = {}
    for name, weight in weights.items():
        matrix = weight.ndim > 1
        faster = cfg.lora_plus is not None and ("lora_B" in name or "lora_embedding_B" in name)
        ratio = cfg.lora_plus if faster and cfg.lora_plus is not None else 1.0
        decay = cfg.weight_decay if matrix else 0.0
        for asked in cfg.groups:
            if any(matches(name, pattern) for pattern in asked.match):
                ratio = asked.rate
                decay = decay if asked.weight_decay is None else asked.weight_decay
                break
        group = {"params": [], "weight_decay": decay, RATIO: ratio}
        groups.setdefault((not matrix, ratio, decay), group)["params"].append(weight)
    return [groups[key] for key in sorted(groups)]


def check_groups(weights: Mapping[str, Tensor], cfg: OptimizerConfig) -> None:
    """A pattern that means no weight is a typing mistake, or meant for another model."""
    names = list(weights)
    for i, group in enumerate(cfg.groups):
        for pattern in group.match:
            if not any(matches(name, pattern) for name in names):
                raise InputError(
                    f"{pattern!r} is the name of no weight that is trained.",
                    where=f"train.optimizer.groups.{i}.match",
                    fix=(
                        f"Their names are such as {names[0]}, {names[-1]}. A critic of other names"
                        " has critic.optimizer."
                    ),
                )


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """The rate of the next update: of each of the `parameter_groups`, times its ratio."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group[RATIO]
