"""Scores a model on held-out rows: generation with its own sampling settings, and the loss of given
completions.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reinforge.core.backend import Backend
from reinforge.core.batch import pack
from reinforge.core.env import Rollout, RolloutContext
from reinforge.core.faults import fault_metrics
from reinforge.core.sample import Group, Row, Sample
from reinforge.evals.statistics import pass_at_k, wilson

CORRECT = 0.999  # a total reward of at least this share of the best possible counts as solved


@dataclass
class HeldOutEvaluation:
    """Generates for every row and scores. Where nothing could be scored, what scores tell is NaN.

    `best` is the largest possible total reward (the sum of positive weights).
    """

    rollout: Rollout
    rows: Sequence[Row]
    samples: int
    best: float = 1.0
    on_groups: Callable[[list[Group]], None] | None = None

    async def __call__(self) -> dict[str, float]:
        groups = await asyncio.gather(
            *(
                self.rollout(row, RolloutContext(f"eval:{i}:{row.id}"))
                for i, row in enumerate(self.rows)
            )
        )
        if self.on_groups is not None:
            self.on_groups(list(groups))
        rewards = [[s.reward for s in g.episodes if s.reward is not None] for g in groups]
        scored = [r for r in rewards if r]
        solved = [sum(value >= CORRECT * self.best for value in r) for r in scored]
        trials = sum(map(len, scored))
        n = len(scored)
        share = low = high = reward = math.nan
        if scored:
            share = sum(c / len(r) for c, r in zip(solved, scored, strict=True)) / n
            # the problems are the independent trials, not their samples
            low, high = wilson(share * n, n)
            reward = sum(map(sum, scored)) / trials
        lengths = [s.n_trained for g in groups for s in g.samples]
        out = {
            "eval/accuracy": share,
            "eval/accuracy_low": low,
            "eval/accuracy_high": high,
            "eval/n": n,
            "eval/reward": reward,
            "eval/length": sum(lengths) / max(1, sum(len(g.episodes) for g in groups)),
            "eval/unscored": sum(len(g.episodes) for g in groups) - trials,
        }
        out |= fault_metrics(groups, "eval/")
        for name in sorted({name for g in groups for name in g.metrics}):
            out[f"eval/{name}"] = sum(g.metrics[name] for g in groups if name in g.metrics) / sum(
                name in g.metrics for g in groups
            )
        if self.samples > 1 and scored and all(len(r) == self.samples for r in scored):
            out[f"eval/pass@{self.samples}"] = pass_at_k(solved, self.samples, self.samples)
        return out


def heldout_loss(backend: Backend, samples: Sequence[Sample], budget: int) -> dict[str, float]:
    """Mean negative log-likelihood per trained token of held-out completions."""
    total = 0.0
    count = 0
    for batch in pack(samples, budget):
        backend.annotate([batch], frozenset({"old"}))
        total -= float(batch.streams["old"].double().sum())
        count += batch.n_trained
    return {"eval/loss": total / max(1, count), "eval/tokens": count}
