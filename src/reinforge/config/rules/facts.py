"""What follows from the algorithm of a configuration and from the settings that change it.

Asked by the rules; it looks at properties of the catalogue, never at an algorithm's name.
"""

from __future__ import annotations

import math

from reinforge.config.algorithm import ReferenceConfig
from reinforge.config.sections import Sections


def dynamic(config: Sections) -> bool:
    """Whether groups without signal are replaced, as the config says or else as the
    algorithm does.
    """
    asked = config.algorithm.dynamic_sampling
    return config.algorithm.spec.dynamic_sampling if asked is None else asked


def moving(config: Sections) -> bool:
    """Whether the reference follows the weights, as the config says or else as the
    algorithm does.
    """
    asked = config.algorithm.kl.reference
    own = config.algorithm.spec.reference
    if own is not None and asked == ReferenceConfig():
        return ReferenceConfig(**own).kind != "frozen"
    return asked.kind != "frozen"


def trained_models(config: Sections) -> int:
    """The policy, and a critic where it is a model of its own."""
    return 1 if config.critic is None or config.critic.shared else 2


def opposed(config: Sections) -> bool:
    """Whether an opponent answers prompts too."""
    return config.algorithm.kind.opponent != "none"


def samples(config: Sections) -> bool:
    """Whether the policy samples what it is trained on."""
    return config.algorithm.rl


def at_once(config: Sections) -> int:
    """Sequences that the native engine has blocks for: as many as a step samples, or all of
    rollout.max_batch where more may come (held-out rows, benchmarks, conversations that go on).
    """
    rollout = config.rollout
    evaluated = config.data.eval.source or config.data.eval.size or config.eval.benchmarks
    if evaluated or rollout.prefix_cache or not samples(config):
        return rollout.max_batch
    prompts = math.ceil(config.train.prompts_per_step * config.sampling.over_provision - 1e-9)
    # in the process of the trainer one step's are generated after the other's
    several = rollout.partial or config.cluster.layout == "split"
    steps = 1 + rollout.staleness if several else 1
    return min(rollout.max_batch, prompts * config.algorithm.group_size * steps)


def best_tokens(config: Sections) -> bool:
    """Whether of a teacher's distribution only the best tokens are read, few enough for a disk or a
    server.
    """
    algorithm = config.algorithm
    asked = {**algorithm.spec.options, **algorithm.options}
    return algorithm.family == "distillation" and asked.get("k") is not None


def whole_distributions(config: Sections) -> bool:
    """Whether a teacher's probabilities of all tokens are compared with the student's."""
    algorithm = config.algorithm
    compares = algorithm.family == "distillation" and "loss" in algorithm.spec.parts
    return compares and not best_tokens(config)


def served_teacher(config: Sections) -> bool:
    """Whether a teacher is behind a server."""
    return config.teacher is not None and config.teacher.served


def uncorrected(config: Sections) -> bool:
    """Whether nothing in the loss knows that samples are older than the weights."""
    algorithm = config.algorithm
    if algorithm.correction.name != "none":
        return False
    return not algorithm.has_ratio or algorithm.old == "recompute"
