"""What rollouts that are ahead of training leave possible: `rollout.staleness` and
`rollout.partial`.
"""

from __future__ import annotations

from reinforge.config.rules.facts import dynamic, samples, uncorrected
from reinforge.config.rules.table import YES, Cell, Column, Feature, No, Rule, Table
from reinforge.config.sections import Sections

STALENESS = "rollout.staleness"
PARTIAL = "rollout.partial"
OVERLAP = "rollout.overlap"


def _not_ahead(why: str, fix: str) -> dict[str, Cell]:
    """Only on-policy."""
    return {
        "on-policy": YES,
        "staleness": No(why, fix, key=STALENESS),
        "partial": No(why, fix, key=PARTIAL),
    }


def _not_partial(why: str, fix: str) -> dict[str, Cell]:
    """Only where a group that is begun is also finished."""
    return {"on-policy": YES, "staleness": YES, "partial": No(why, fix, key=PARTIAL)}


def _depends_on_rewards(config: Sections) -> bool:
    """Whether what is generated next cannot be known ahead."""
    early = config.rollout.staleness > 0 and not config.rollout.partial
    return early and (dynamic(config) or config.sampling.over_provision > 1)


FEATURES = (
    Feature(
        "An algorithm that samples nothing",
        "algorithm.name",
        lambda c: not samples(c),
        _not_ahead("{algorithm} samples nothing", "remove it"),
    ),
    Feature(
        "Replay of old groups",
        "sampling.replay",
        lambda c: c.sampling.replay is not None,
        _not_ahead(
            "not beside sampling.replay, which has a bound of its own", "leave one of them out"
        ),
    ),
    Feature(
        "Rewards centred or scaled by a running mean",
        "rewards.N.center, rewards.N.scale",
        lambda c: any(r.center is not None or r.scale is not None for r in c.rewards),
        _not_ahead(
            "a reward that is centred or scaled by a running mean needs all earlier steps",
            "leave one of them out",
        ),
    ),
    Feature(
        "Stop strings",
        "rollout.stop",
        lambda c: bool(c.rollout.stop),
        _not_partial("a stop string across a cut would not be seen", "leave rollout.stop out"),
    ),
    Feature(
        "An agent",
        "agent",
        lambda c: c.agent is not None,
        _not_partial("an agent cannot be cut and go on", "leave it out"),
    ),
    Feature(
        "Preferences over sampled answers",
        "algorithm.name",
        lambda c: c.algorithm.kind.online,
        _not_partial("{algorithm} trains on fresh answers only", "leave it out"),
    ),
    Feature(
        "Dynamic sampling",
        "algorithm.dynamic_sampling",
        dynamic,
        _not_partial(
            "{algorithm} has dynamic sampling, which replaces groups by their rewards",
            "set algorithm.dynamic_sampling=false, or leave rollout.partial out",
        ),
    ),
    Feature(
        "Every rank generates",
        "rollout.all_ranks",
        lambda c: c.rollout.all_ranks is True,
        _not_partial(
            "ranks that generate together do not tell tokens as they come, so what is cut would be"
            " lost",
            "set rollout.all_ranks=false, or leave rollout.partial out",
        ),
    ),
    Feature(
        "Generating while a step trains, in its process",
        OVERLAP,
        lambda c: c.rollout.overlap,
        {
            "on-policy": No(
                "on-policy rollouts need the weights that the step is about to make",
                "set rollout.staleness to at least 1",
            ),
            "staleness": YES,
            "partial": No(
                "what a step cuts goes on when it has trained", "leave rollout.partial out"
            ),
        },
    ),
)

RULES = (
    Rule(
        PARTIAL,
        lambda c: c.rollout.partial and not c.rollout.staleness,
        "what goes on in the next step is one step old",
        "set rollout.staleness to at least 1",
    ),
    Rule(
        PARTIAL,
        lambda c: c.rollout.partial and c.sampling.over_provision <= 1,
        "nothing would be left over",
        "set sampling.over_provision, e.g. to 1.25",
    ),
    Rule(
        OVERLAP,
        lambda c: c.rollout.overlap and dynamic(c),
        "with dynamic sampling rewards decide what else a step generates, and weights of rows may"
        " change meanwhile",
        "leave it out, or set algorithm.dynamic_sampling=false",
    ),
    Rule(
        OVERLAP,
        lambda c: c.rollout.overlap and c.sampling.over_provision > 1 and not c.rollout.partial,
        "what comes after a step would depend on who is first",
        "leave it out, or set sampling.over_provision=1",
    ),
    Rule(
        OVERLAP,
        lambda c: c.rollout.overlap and c.rollout.kept is not None,
        "kept rollouts are trained on, and nothing is generated",
        "leave it out",
    ),
)

ASYNCHRONY = Table(
    "Asynchrony",
    "How far rollouts may be ahead of training: not at all, whole groups by some steps, or groups"
    " that a step cuts and the next one goes on with.",
    (
        Column("on-policy", "`rollout.staleness: 0`", lambda c: not c.rollout.staleness),
        Column("staleness", "`rollout.staleness: 1` or more", lambda c: c.rollout.staleness > 0),
        Column("partial", "`rollout.partial: true`", lambda c: c.rollout.partial),
    ),
    FEATURES,
    RULES,
)

# what works and may not be meant; `plan` warns of it
DOUBTS = (
    Rule(
        STALENESS,
        lambda c: 0 < (c.train.steps or 0) <= c.rollout.staleness,
        "every step trains on what the first weights sampled",
        "set it below train.steps; 1 or 2 hide most of what can be hidden",
    ),
    Rule(
        STALENESS,
        lambda c: c.rollout.staleness > 0 and uncorrected(c) and not c.algorithm.has_ratio,
        "samples are up to {staleness} steps old, and the surrogate {surrogate} has no ratio: the"
        " gradient is that of another policy",
        "set algorithm.correction.name, e.g. to tis, or rollout.staleness=0",
    ),
    Rule(
        STALENESS,
        lambda c: c.rollout.staleness > 0 and uncorrected(c) and c.algorithm.has_ratio,
        "samples are up to {staleness} steps old, and algorithm.old: recompute leaves out who"
        " sampled: the gradient is that of another policy",
        "set algorithm.correction.name, e.g. to tis, or rollout.staleness=0",
    ),
    Rule(
        "algorithm.dynamic_sampling",
        lambda c: _depends_on_rewards(c) and dynamic(c),
        "what is generated next depends on rewards: staleness then hides nothing",
        "leave one of them out",
    ),
    Rule(
        "sampling.over_provision",
        lambda c: _depends_on_rewards(c) and not dynamic(c),
        "what is generated next depends on who is first: staleness then hides nothing",
        "leave one of them out",
    ),
)
