"""Rollouts of which some are the data's own answers instead of the policy's (GKD, 2306.13649)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from reinforge.core.env import Rollout, RolloutContext
from reinforge.core.sample import Group, Row, Sample
from reinforge.core.seeds import seed_of


@dataclass
class DemonstrationRollout:
    """A `Rollout` around another one: with probability `share` that one answers a prompt, otherwise
    the answer in the data does. The coin is a function of the run's seed and the group, so a step
    that is done again draws the same.
    """

    rollout: Rollout
    answers: Mapping[str, Sample]  # by row id
    share: float
    seed: int

    async def __call__(self, row: Row, context: RolloutContext) -> Group:
        group = context.group
        if (seed_of(self.seed, "demonstrated", group) >> 10) / 2**53 < self.share:
            return await self.rollout(row, context)
        uid = f"{group}#0"
        return Group(
            row,
            [self.answers[row.id].with_(uid=uid, group=group, episode=uid, reward=0.0)],
            [str(row.columns.get("completion", ""))],
        )
