"""Rollouts whose samples know the domain of their row."""

from __future__ import annotations

from dataclasses import dataclass, replace

from reinforge.core.env import Rollout, RolloutContext
from reinforge.core.sample import Group, Row
from reinforge.data.domains import Domains


@dataclass
class DomainRollout:
    """A `Rollout` around another one, for a student whose teachers are chosen by domain."""

    rollout: Rollout
    domains: Domains

    async def __call__(self, row: Row, context: RolloutContext) -> Group:
        group = await self.rollout(row, context)
        return replace(group, samples=self.domains.mark(row, group.samples))
