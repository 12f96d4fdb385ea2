"""What an optimizer keeps of its parameters, as tensors with names, and back.

layer.weight/exp_avg      a tensor of the state of a parameter
layer.weight/k:number     a number of it, which torch's own optimizers do not have
#0/d:number               a number of a group of parameters, of a user's optimizer
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from reinforge.backends.update_rules import KEPT, NAME, RATIO
from reinforge.core.errors import InputError

NUMBER = ":number"
# of a group: what the run sets itself
SET = frozenset({"params", "lr", RATIO, "weight_decay"})
MASTER = "master"


def kept_of(updates: Sequence[Optimizer], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The states of all parameters, and of a user's optimizer the numbers of its groups."""
    out: dict[str, Tensor] = {}
    for name, weight in weights.items():
        for update in updates:
            for key, value in update.state.get(weight, {}).items():
                out |= _as_tensor(f"{name}/{key}", value, update)
    for update in updates:
        if type(update) not in KEPT:
            for i, group in enumerate(update.param_groups):
                for key, value in group.items():
                    if key not in SET and isinstance(value, bool | int | float):
                        out |= _as_tensor(f"#{i}/{key}", value, update)
    return out


def _as_tensor(key: str, value: object, update: Optimizer) -> dict[str, Tensor]:
    if isinstance(value, Tensor):
        return {key: value}
    if isinstance(value, bool | int | float):
        dtype = torch.float64 if isinstance(value, float) else torch.int64
        return {key + NUMBER: torch.tensor(value, dtype=dtype)}
    if value is None:
        return {}
    raise InputError(
        f"{type(update).__name__} keeps a {type(value).__name__} as {key.rpartition('/')[2]!r},"
        " which a checkpoint does not hold.",
        where=NAME,
        fix="Let it keep tensors and numbers only.",
    )


@torch.no_grad()
def load_kept(
    updates: Sequence[Optimizer], weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> None:
    """What `kept_of` gave, in place of what is kept now. The state of another kind of optimizer is
    refused.
    """
    keys: dict[str, list[str]] = {}
    for full in tensors:
        name, _, key = full.rpartition("/")
        if key != MASTER:
            keys.setdefault(name, []).append(key)
    for update in updates:
        update.state.clear()
        held = {weight for group in update.param_groups for weight in group["params"]}
        for name, weight in weights.items():
            if weight in held and name in keys:
                _check(update, name, keys[name])
                update.state[weight] = {
                    key.removesuffix(NUMBER): _loaded(update, weight, key, tensors[f"{name}/{key}"])
                    for key in keys[name]
                }
        for i, group in enumerate(update.param_groups):
            for key in keys.get(f"#{i}", ()):
                group[key.removesuffix(NUMBER)] = tensors[f"#{i}/{key}"].item()


def _loaded(update: Optimizer, weight: Tensor, key: str, value: Tensor) -> Tensor | float:
    if key.endswith(NUMBER):
        return value.item()
    # a count of steps is where torch looks for it: with the weights for a fused update
    beside = value.ndim > 0 or any(
        group.get("fused") or group.get("capturable") for group in update.param_groups
    )
    return value.clone().to(weight.device if beside else "cpu")


def _check(update: Optimizer, name: str, keys: Sequence[str]) -> None:
    known = KEPT.get(type(update))
    if known is not None and frozenset(keys) not in known:
        refuse_other(type(update).__name__, name, keys, known)


def refuse_other(
    update: str, name: str, keys: Sequence[str], known: Sequence[frozenset[str]]
) -> NoReturn:
    """What is saved of a parameter is the state of another optimizer."""
    raise InputError(
        f"the checkpoint holds {', '.join(sorted(keys))} of {name}, and {update} keeps"
        f" {' or '.join(', '.join(sorted(one)) for one in known)}.",
        where=NAME,
        fix=(
            "Go on with the optimizer that the run was made with, or begin a new run with its model"
            " (`reinforge export`)."
        ),
    )
