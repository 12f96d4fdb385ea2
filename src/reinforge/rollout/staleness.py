"""How old what is trained may be. The rollout buffer and partial rollouts count steps, the replay
buffer versions of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reinforge.core.sample import Group


@dataclass(frozen=True, slots=True)
class StalenessPolicy:
    """A bound on age, in steps or in versions of the weights: 0 is on-policy.

    Made by whatever holds groups between sampling and training.
    """

    bound: int

    def allows(self, now: int, then: int) -> bool:
        """Whether what is from `then` may be trained `now`."""
        return now - then <= self.bound

    def due(self, now: int, then: int) -> bool:
        """Whether what is from `then` must be trained `now`, because later it would be too old."""
        return now - then >= self.bound


def oldest_version(group: Group) -> int:
    """The oldest weights that sampled any of it; -1 where nothing was sampled."""
    sampled = [
        int(s.versions.numpy()[s.trained.numpy()].min()) for s in group.samples if s.n_trained
    ]
    return min(sampled, default=-1)


def split_stale(groups: Sequence[Group], oldest: int) -> tuple[list[Group], list[Group]]:
    """Those without a token of older weights than `oldest`, and the others."""
    fresh: list[Group] = []
    stale: list[Group] = []
    for group in groups:
        too_old = 0 <= oldest_version(group) < oldest
        (stale if too_old else fresh).append(group)
    return fresh, stale
