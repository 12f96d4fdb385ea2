"""What the algorithm's row of the catalogue brings along, against the rest of the config.

It asks for properties, never for names: a row that is like another one is treated like it. No
torch: `plan` looks here first.
"""

from __future__ import annotations

from collections.abc import Iterator

from reinforge.config.algorithm import ReferenceConfig
from reinforge.config.schema import Config
from reinforge.core.errors import InputError

Told = tuple[str, str, str]  # the key, what about it, and what to do


def conflicts(config: Config) -> Iterator[Told]:
    """What cannot be."""
    if config.rollout.partial and dynamic(config):
        yield (
            "rollout.partial",
            (
                f"{config.algorithm.name} has dynamic sampling, which replaces groups by their"
                " rewards."
            ),
            "Set algorithm.dynamic_sampling=false, or leave rollout.partial out.",
        )
    if not moving(config):
        return
    if config.train.precompute_reference:
        yield (
            "train.precompute_reference",
            f"{config.algorithm.name} has no frozen reference.",
            "Remove it.",
        )
    if config.train.backend in ("deepspeed", "megatron"):
        yield (
            "algorithm.kl.reference",
            (
                f"the reference of {config.algorithm.name} follows the weights, and the backend"
                f" {config.train.backend} has a frozen one only."
            ),
            "Set train.backend=fsdp or local.",
        )


def refuse_conflicts(config: Config) -> None:
    for key, what, fix in conflicts(config):
        raise InputError(what, where=key, fix=fix)


def warnings(config: Config) -> Iterator[Told]:
    """What will work and may not be meant."""
    if not config.rollout.staleness:
        return
    algorithm = config.algorithm
    surrogate = algorithm.surrogate or algorithm.spec.parts.get("surrogate")
    without_ratio = not algorithm.has_ratio
    if algorithm.correction.name == "none" and (without_ratio or algorithm.old == "recompute"):
        why = (
            f"the surrogate {surrogate} has no ratio"
            if without_ratio
            else "algorithm.old: recompute leaves out who sampled"
        )
        yield (
            "rollout.staleness",
            (
                f"samples are up to {config.rollout.staleness} steps old, and {why}: the gradient"
                " is that of another policy."
            ),
            "Set algorithm.correction.name, e.g. to tis, or rollout.staleness=0.",
        )
    if (dynamic(config) or config.sampling.over_provision > 1) and not config.rollout.partial:
        yield (
            "algorithm.dynamic_sampling" if dynamic(config) else "sampling.over_provision",
            (
                "what is generated next depends on rewards or on who is first: staleness then hides"
                " nothing."
            ),
            "Leave one of them out.",
        )


def dynamic(config: Config) -> bool:
    """Whether groups without signal are replaced, as the config says or else as the
    algorithm does.
    """
    asked = config.algorithm.dynamic_sampling
    return config.algorithm.spec.dynamic_sampling if asked is None else asked


def moving(config: Config) -> bool:
    """Whether the reference follows the weights, as the config says or else as the
    algorithm does.
    """
    asked = config.algorithm.kl.reference
    own = config.algorithm.spec.reference
    if own is not None and asked == ReferenceConfig():
        return ReferenceConfig(**own).kind != "frozen"
    return asked.kind != "frozen"
