"""What follows from the algorithm of a configuration and from the settings that change it.

Asked by the rules; it looks at properties of the catalogue, never at an algorithm's name.
"""

from __future__ import annotations

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


def opposed(config: Sections) -> bool:
    """Whether an opponent answers prompts too."""
    return config.algorithm.kind.opponent != "none"


def samples(config: Sections) -> bool:
    """Whether the policy samples what it is trained on."""
    return config.algorithm.rl


def uncorrected(config: Sections) -> bool:
    """Whether nothing in the loss knows that samples are older than the weights."""
    algorithm = config.algorithm
    if algorithm.correction.name != "none":
        return False
    return not algorithm.has_ratio or algorithm.old == "recompute"
