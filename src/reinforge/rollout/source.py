"""Where a step's groups come from: the cursor says which rows, the rollout turns each into a group."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from reinforge.core.env import Rollout
from reinforge.core.sample import Group, Row, Stop
from reinforge.data.cursor import Cursor


@dataclass(slots=True)
class Harvest:
    groups: list[Group]  # what is trained
    discarded: list[Group] = field(default_factory=list)  # groups without signal that dynamic sampling replaced
    rounds: int = 1

    @property
    def sampled_tokens(self) -> int:
        return sum(s.n_trained for g in [*self.groups, *self.discarded] for s in g.samples)


def has_signal(group: Group) -> bool:
    """Whether the group's rewards differ, so that it can teach anything."""
    rewards = {s.reward for s in group.samples if s.reward is not None}
    return len(rewards) > 1


class Source:
    """Groups for one optimizer step at a time. All prompts of a round are submitted at once, in the cursor's order, so what
    the engine does is a function of the step alone. With `dynamic`, groups whose rewards are all equal are replaced by
    fresh prompts, in at most `max_refills` further rounds; if even then too few are left, the step trains on those."""

    def __init__(self, rows: Sequence[Row], cursor: Cursor, rollout: Rollout, prompts: int, *, dynamic: bool = False, max_refills: int = 0):
        self.rows, self.cursor, self.rollout = rows, cursor, rollout
        self.prompts, self.dynamic, self.max_refills = prompts, dynamic, max_refills

    async def harvest(self) -> Harvest:
        before = self.cursor.state()
        try:
            result = Harvest(await self._round(self.prompts))
            while self.dynamic:
                result.discarded += [g for g in result.groups if not has_signal(g)]
                result.groups = [g for g in result.groups if has_signal(g)]
                missing = self.prompts - len(result.groups)
                if not missing or result.rounds > self.max_refills:
                    break
                result.groups += await self._round(missing)
                result.rounds += 1
            return result
        except BaseException:
            self.cursor.load(before)  # a step that was cut is done again from its start
            raise

    async def _round(self, prompts: int) -> list[Group]:
        first = self.cursor.taken
        rows = [self.rows[i] for i in self.cursor.take(prompts)]
        tasks = [asyncio.ensure_future(self.rollout(row, f"{first + i}:{row.id}")) for i, row in enumerate(rows)]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise


def harvest_metrics(harvest: Harvest, weights: dict[str, float]) -> dict[str, float]:
    """What the rollouts of a step looked like: rewards, lengths, how they ended, which groups can teach."""
    everything = [*harvest.groups, *harvest.discarded]
    samples = [s for g in everything for s in g.samples]
    rewards = [s.reward for s in samples if s.reward is not None]
    lengths = [s.n_trained for s in samples]
    mean = sum(rewards) / len(rewards) if rewards else float("nan")
    out = {
        "reward/mean": mean,
        "reward/std": (sum((r - mean) ** 2 for r in rewards) / max(1, len(rewards) - 1)) ** 0.5,
        "reward/unscored": 1 - len(rewards) / max(1, len(samples)),
        "response/length": sum(lengths) / max(1, len(lengths)),
        "response/max_length": max(lengths, default=0),
        "response/truncated": sum(s.stop is Stop.LENGTH for s in samples) / max(1, len(samples)),
        "groups/zero_variance": sum(not has_signal(g) for g in everything) / max(1, len(everything)),
        "groups/trained": len(harvest.groups),
        "groups/rounds": harvest.rounds,
        "tokens/sampled": harvest.sampled_tokens,
    }
    for name in [*weights, *(["overlong"] if any("overlong" in s.rewards for s in samples) else [])]:
        scored = [v for s in samples if (v := s.rewards.get(name)) is not None]
        if scored:
            out[f"reward/{name}"] = sum(scored) / len(scored)
    return out
