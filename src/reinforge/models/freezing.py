"""Some weights of a model stay as they are: `train.freeze` and `train.only`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from reinforge.config.train import TrainConfig
from reinforge.core.errors import InputError
from reinforge.models.causal import VALUE_HEAD
from reinforge.models.scalar import HEAD

# of a reward model or critic: new, so it is trained whatever the patterns say
HEADS = (f"{HEAD}.weight", f"{VALUE_HEAD}.weight")


def freeze(module: nn.Module, train: TrainConfig) -> None:
    """Takes the gradient from every weight that the run is not to train."""
    if not (train.freeze or train.only):
        return
    learns = set(trained_names(module, train))
    for name, parameter in module.named_parameters():
        if name not in learns:
            parameter.requires_grad_(False)


def trained_names(module: nn.Module, train: TrainConfig) -> list[str]:
    """The names of the weights that a run trains. A pattern that means no weight at all is an
    error: it is a typing mistake, or a model of other names.
    """
    names = [name for name, _ in module.named_parameters()]
    frozen = _matched(names, train.freeze, "train.freeze", module)
    wanted = _matched(names, train.only, "train.only", module) if train.only else set(names)
    learns = [name for name in names if name in HEADS or name in wanted - frozen]
    if not learns:
        raise InputError(
            "no weight is left to train.",
            where="train.freeze" if train.freeze else "train.only",
            fix="Freeze fewer weights.",
        )
    return learns


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern means the weight, or a module that it lies in.

    >>> matches("model.layers.3.mlp.up_proj.weight", "model.layers.[0-3]")
    True
    >>> matches("model.layers.30.mlp.up_proj.weight", "model.layers.3")
    False
    """
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def _matched(names: Iterable[str], patterns: Sequence[str], where: str, module: Any) -> set[str]:
    found: set[str] = set()
    for pattern in patterns:
        meant = {name for name in names if matches(name, pattern)}
        if not meant:
            raise InputError(
                f"{pattern!r} is the name of no weight of this model.",
                where=where,
                fix=f"Its weights have names such as {_some(names)}.{_tied(module, pattern)}",
            )
        found |= meant
    return found


def _some(names: Iterable[str]) -> str:
    several = list(names)
    shown = dict.fromkeys((several[0], several[len(several) // 2], several[-1]))
    return ", ".join(shown)


def _tied(module: Any, pattern: str) -> str:
    """What to say where the pattern means the head, which is the embedding."""
    if "head" not in pattern or not module.config.tie_word_embeddings:
        return ""
    return " Its output head is its input embedding, and goes by that name."
