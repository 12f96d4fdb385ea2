"""Who generates where several ranks train with the native engine: rank 0, or every rank a share
(`rollout.all_ranks`).

Imports no torch: `plan` tells it before anything is loaded.
"""

from __future__ import annotations

from reinforge.config.sections import Sections


def on_all_ranks(config: Sections, ranks: int, device: str) -> bool:
    """Whether every rank generates, as the config says or else where it pays. `device`: the kind
    that the ranks train on.
    """
    asked = config.rollout.all_ranks
    if asked != "auto":
        return asked
    return ranks > 1 and _has_choice(config) and obstacle(config, device) is None


def told(config: Sections, ranks: int | None, device: str | None) -> str | None:
    """Who generates what is trained on, in words; None where there is nothing to choose. Before a
    cluster is asked neither `ranks` nor `device` need be known.
    """
    if not _has_choice(config) or not config.algorithm.rl or ranks == 1:
        return None
    every = "every rank" if ranks is None else f"each of the {ranks} ranks"
    asked = config.rollout.all_ranks
    if asked != "auto":
        return f"{every} generates a share" if asked else "rank 0 generates"
    if (why := obstacle(config, device or "cuda")) is not None:
        return f"rank 0 generates, because {why} (rollout.all_ranks: auto)"
    where = "" if device is not None else " where ranks have GPUs, and rank 0 elsewhere"
    return f"{every} generates a share{where} (rollout.all_ranks: auto)"


def obstacle(config: Sections, device: str) -> str | None:
    """Why `auto` leaves generating to rank 0. Memory is no reason: rank 0 has the same shards as
    the others and needs room for a copy of the model in any case.
    """
    if device != "cuda":
        return "ranks on CPUs share the cores that it has"
    if not config.algorithm.rl:
        return "answers are for evaluations only"
    if config.rollout.kept is not None:
        return "the rollouts of another run are trained on"
    if config.env is not None or config.agent is not None:
        return "a turn would wait until all ranks have answered those before it"
    if config.sampling.over_provision > 1:
        return "answers of all ranks come together, and the longest could not be left behind"
    return None


def _has_choice(config: Sections) -> bool:
    """Whether ranks train and generate with the same devices."""
    apart = config.cluster.kind == "ray" and config.cluster.layout == "split"
    on_ranks = config.train.backend != "local"
    return on_ranks and config.rollout.engine == "native" and not apart
