"""Groups that taught much are trained on again, for a bounded time: each at most `max_uses` times,
never when older than `max_staleness` optimizer versions.

A replayed group is off-policy: its behaviour log-probs are those of the weights that sampled it,
and the loss must weigh by exp(logp - behaviour), through the ratio of its surrogate (old =
behaviour) or through a correction.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from reinforge.core.backend import State
from reinforge.core.sample import Group, Row
from reinforge.data.disk_rows import RowsById
from reinforge.rollout.group_state import groups_from_state, groups_to_state
from reinforge.rollout.staleness import StalenessPolicy, oldest_version


@dataclass(slots=True)
class ReplayEntry:
    """A group that may be trained again, and how often it was. The replay buffer keeps it."""

    group: Group
    version: int  # the oldest weights that sampled any of it
    score: float
    uses: int = 0

    @property
    def name(self) -> str:
        return self.group.samples[0].group


def informative(group: Group) -> float:
    """The population variance of the group's rewards: p (1 - p) of a pass/fail reward, largest
    where half of the samples pass. Up to their scale it is also the variance of the advantages.
    """
    rewards = [s.reward for s in group.episodes if s.reward is not None]
    if not rewards:
        return 0.0
    mean = sum(rewards) / len(rewards)
    return sum((r - mean) ** 2 for r in rewards) / len(rewards)


class ReplayBuffer:
    """The replay buffer: the `size` most informative groups, and which of them the next step trains
    on again. The group source asks it.

    `pick` changes nothing; `commit` is called once a step is complete.
    """

    def __init__(
        self, rows: Sequence[Row], *, size: int, share: float, max_staleness: int, max_uses: int
    ):
        self.rows: Mapping[str, Row] = RowsById(rows)
        self.size = size
        self.share = share
        self.staleness = StalenessPolicy(max_staleness)
        self.max_uses = max_uses
        self.kept: list[ReplayEntry] = []  # best first: by score, then by age

    def pick(self, prompts: int, version: int) -> list[ReplayEntry]:
        """At most share x prompts groups that are fresh enough, the most informative first."""
        usable = [k for k in self.kept if self.staleness.allows(version, k.version)]
        return usable[: math.floor(self.share * prompts + 1e-9)]

    def commit(self, used: Sequence[ReplayEntry], fresh: Iterable[Group], version: int) -> None:
        for kept in used:
            kept.uses += 1
        arrived = [ReplayEntry(g, oldest_version(g), informative(g)) for g in fresh]
        alive = [
            k
            for k in self.kept
            if k.uses < self.max_uses and self.staleness.allows(version, k.version)
        ]
        # the sort is stable: of equal score, the newest first
        everything = [k for k in arrived if k.score > 0] + alive
        self.kept = sorted(everything, key=lambda k: (-k.score, -k.version))[: self.size]

    def report(self, used: Sequence[ReplayEntry], version: int) -> dict[str, float]:
        out = {"replay/size": float(len(self.kept)), "replay/groups": float(len(used))}
        return out | (
            {"replay/staleness": sum(version - k.version for k in used) / len(used)} if used else {}
        )

    # ---- a Part ----

    def state(self) -> State:
        return groups_to_state(
            [k.group for k in self.kept],
            [{"version": k.version, "score": k.score, "uses": k.uses} for k in self.kept],
        )

    def load(self, state: State) -> None:
        groups = groups_from_state(state, self.rows, "replay buffer")
        self.kept = [
            ReplayEntry(g, told["version"], told["score"], told["uses"])
            for g, told in zip(groups, state.meta["groups"], strict=True)
        ]
