"""How far rollouts may be ahead of training: keys of the section `rollout`, and what they ask of the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from reinforge.config.base import Natural, Section
from reinforge.config.families import ONLINE

if TYPE_CHECKING:
    from reinforge.config.schema import Config


WITHOUT_RATIO = ("reinforce", "gpg", "rloo", "remax", "opo")  # algorithms whose own surrogate has none


class AheadConfig(Section):
    staleness: Natural = Field(
        0,
        description="Steps that rollouts may be ahead of training. 0: on-policy. With 1, rewards of a step are computed while others generate and train.",
    )
    partial: bool = Field(
        False,
        description="Groups that are not generated when a step has enough go on in the next one, at most `staleness` steps later. "
        "Needs sampling.over_provision above 1: that many prompts are under way for each one that is trained.",
    )


def check_ahead(config: Config) -> None:
    if config.rollout.partial:
        _check_partial(config)
    if not config.rollout.staleness:
        return
    if not config.algorithm.rl:
        raise ValueError(f"rollout.staleness: {config.algorithm.name} samples nothing; remove it")
    if config.sampling.replay is not None:
        raise ValueError("rollout.staleness: not beside sampling.replay, which has a bound of its own; leave one of them out")
    if any(r.center is not None or r.scale is not None for r in config.rewards):
        raise ValueError(
            "rollout.staleness: a reward that is centred or scaled by a running mean needs all earlier steps; leave one of them out"
        )


def _check_partial(config: Config) -> None:
    """What goes on later must be allowed to be old, and must be something that can be cut."""
    algorithm = config.algorithm
    for wrong, why in (
        (not config.rollout.staleness, "what goes on in the next step is one step old; set rollout.staleness to at least 1"),
        (config.sampling.over_provision <= 1, "nothing would be left over; set sampling.over_provision, e.g. to 1.25"),
        (bool(config.rollout.stop), "a stop string across a cut would not be seen; leave rollout.stop out"),
        (config.agent is not None, "an agent cannot be cut and go on; leave it out"),
        (_dynamic(config), "dynamic sampling replaces groups by their rewards; set algorithm.dynamic_sampling=false"),
        (algorithm.name in ONLINE, f"{algorithm.name} trains on fresh answers only; leave it out"),
    ):
        if wrong:
            raise ValueError(f"rollout.partial: {why}")


def _dynamic(config: Config) -> bool:
    asked = config.algorithm.dynamic_sampling
    return asked if asked is not None else config.algorithm.name == "dapo"


def warnings(config: Config) -> list[tuple[str, str, str]]:
    """(Key, what, what to do) of what will work and may not be meant."""
    if not config.rollout.staleness:
        return []
    found = []
    algorithm = config.algorithm
    plain = algorithm.surrogate == "reinforce" or (algorithm.surrogate is None and algorithm.name in WITHOUT_RATIO)
    if algorithm.correction.name == "none" and (plain or algorithm.old == "recompute"):
        why = "the surrogate reinforce has no ratio" if plain else "algorithm.old: recompute leaves out who sampled"
        found.append(("rollout.staleness", f"samples are up to {config.rollout.staleness} steps old, and {why}: the gradient is that of another policy.",
                      "Set algorithm.correction.name, e.g. to tis, or rollout.staleness=0."))  # fmt: skip
    if (_dynamic(config) or config.sampling.over_provision > 1) and not config.rollout.partial:
        key = "algorithm.dynamic_sampling" if _dynamic(config) else "sampling.over_provision"
        found.append(
            (key, "what is generated next depends on rewards or on who is first: staleness then hides nothing.", "Leave one of them out.")
        )
    return found
