"""How far rollouts may be ahead of training: keys of the section `rollout`, and what they ask of
the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reinforge.config.schema import Config


def check_ahead(config: Config) -> None:
    if config.rollout.partial:
        _check_partial(config)
    if not config.rollout.staleness:
        return
    if not config.algorithm.rl:
        raise ValueError(f"rollout.staleness: {config.algorithm.name} samples nothing; remove it")
    if config.sampling.replay is not None:
        raise ValueError(
            "rollout.staleness: not beside sampling.replay, which has a bound of its own; leave one"
            " of them out"
        )
    if any(r.center is not None or r.scale is not None for r in config.rewards):
        raise ValueError(
            "rollout.staleness: a reward that is centred or scaled by a running mean needs all"
            " earlier steps; leave one of them out"
        )


def _check_partial(config: Config) -> None:
    """What goes on later must be allowed to be old, and must be something that can be cut."""
    algorithm = config.algorithm
    for wrong, why in (
        (
            not config.rollout.staleness,
            "what goes on in the next step is one step old; set rollout.staleness to at least 1",
        ),
        (
            config.sampling.over_provision <= 1,
            "nothing would be left over; set sampling.over_provision, e.g. to 1.25",
        ),
        (
            bool(config.rollout.stop),
            "a stop string across a cut would not be seen; leave rollout.stop out",
        ),
        (config.agent is not None, "an agent cannot be cut and go on; leave it out"),
        (algorithm.kind.online, f"{algorithm.name} trains on fresh answers only; leave it out"),
    ):
        if wrong:
            raise ValueError(f"rollout.partial: {why}")
