"""Single-turn rollouts: one prompt, n completions, scored.

The trained ids are the sampled ids; text is only for rewards.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from reinforge.core.arrays import floats, ints
from reinforge.core.engine import Completion, Engine, Sampling
from reinforge.core.sample import Group, Row, Sample, Stop
from reinforge.core.seeds import seed_of
from reinforge.rewards.function import FunctionReward
from reinforge.rewards.running import Running
from reinforge.rollout import pace
from reinforge.rollout.first_finished import first_finished
from reinforge.rollout.journal import Journal, Scores
from reinforge.rollout.scoring import RewardScorer

Scored = tuple[list[Completion], list[str], Scores]  # completions, their texts and scores


class SingleTurn:
    """A `Rollout`: (row, group id) -> Group. Draws depend on (seed, purpose, group id) and nothing
    else.
    """

    def __init__(
        self,
        engine: Engine,
        encode: Callable[[Row], list[int]],
        decode: Callable[[Sequence[int]], str],
        rewards: Sequence[FunctionReward],
        sampling: Sampling,
        *,
        n: int,
        seed: int,
        purpose: str = "sample",
        journal: Journal | None = None,
        shape: Callable[[int], float] | None = None,
        on_error: str = "raise",
        greedy_baseline: bool = False,
        running: Running | None = None,
    ):
        self.engine = engine
        self.encode = encode
        self.decode = decode
        self.sampling = sampling
        self.n = n
        self.seed = seed
        self.purpose = purpose
        self.scorer = RewardScorer(rewards, journal=journal, on_error=on_error, shape=shape)
        self.scorer.running = running
        # a process reward model's verdicts are rewards of tokens
        self.by_step = purpose == "sample" and self.scorer.by_step()
        # one more completion per prompt, greedy: its reward is every sample's baseline (remax)
        self.greedy_baseline = greedy_baseline

    @property
    def errors(self) -> list[str]:
        """Rewards that failed and were tolerated, for the log."""
        return self.scorer.errors

    async def __call__(self, row: Row, group: str) -> Group:
        prompt = self.encode(row)
        drawn = self._complete(
            row, group, prompt, self.sampling, seed_of(self.seed, self.purpose, group), self.n
        )
        if not self.greedy_baseline:
            completions, texts, scores = await drawn
            return Group(
                row,
                self._samples(row, group, prompt, completions, texts, scores),
                texts,
                faults=self.scorer.faults(group),
                why=self.scorer.why(group),
            )
        pace.expect(2)
        greedy = self._complete(
            row,
            f"{group}#greedy",
            prompt,
            replace(self.sampling, temperature=0.0),
            seed_of(self.seed, "baseline", group),
            1,
        )
        done: dict[int, Scored] = {}

        def keep(place: int, scored: Scored) -> bool:
            done[place] = scored
            return False  # both are wanted

        # at once: the engine batches them, and a failure of one cancels the other
        await first_finished([drawn, greedy], keep)
        (completions, texts, scores), ([likeliest], _, its_scores) = done[0], done[1]
        baseline = self._total(likeliest, its_scores, 0)[1]
        samples = [
            s.with_(baseline=baseline)
            for s in self._samples(row, group, prompt, completions, texts, scores)
        ]
        faults = Counter(self.scorer.faults(group)) + Counter(self.scorer.faults(f"{group}#greedy"))
        why = {**self.scorer.why(f"{group}#greedy"), **self.scorer.why(group)}
        return Group(
            row, samples, texts, extra_tokens=len(likeliest.tokens), faults=faults, why=why
        )

    async def scored(
        self, row: Row, group: str, prompt: list[int], completions: list[Completion]
    ) -> Group:
        """The group that these completions are, whoever wrote them."""
        texts = [self.decode(c.tokens) for c in completions]
        scores = await self.scorer.score(
            [row] * len(texts), group, [c.tokens for c in completions], texts
        )
        return Group(
            row,
            self._samples(row, group, prompt, completions, texts, scores),
            texts,
            faults=self.scorer.faults(group),
            why=self.scorer.why(group),
        )

    async def _complete(
        self, row: Row, name: str, prompt: list[int], sampling: Sampling, key: int, n: int
    ) -> Scored:
        completions = await self.engine.generate(prompt, sampling, key=key, n=n)
        pace.generated()
        texts = [self.decode(c.tokens) for c in completions]
        return (
            completions,
            texts,
            await self.scorer.score(
                [row] * len(texts), name, [c.tokens for c in completions], texts
            ),
        )

    def _samples(
        self,
        row: Row,
        group: str,
        prompt: list[int],
        completions: list[Completion],
        texts: list[str],
        scores: Scores,
    ) -> list[Sample]:
        samples = [
            _sample(f"{group}#{i}", group, prompt, c, *self._total(c, scores, i))
            for i, c in enumerate(completions)
        ]
        if not self.by_step:
            return samples
        steps = self.scorer.steps([row] * len(texts), texts)
        return [
            self._with_steps(*each, len(prompt))
            for each in zip(samples, completions, steps, strict=True)
        ]

    def _with_steps(
        self, sample: Sample, completion: Completion, steps: list[tuple[int, float]], before: int
    ) -> Sample:
        """Each step's reward at the first token with which the text has reached its end; found by
        bisection, a text only grows.
        """
        rewards = torch.zeros(len(sample.tokens))
        for end, value in steps:
            at = bisect_left(
                range(len(completion.tokens)),
                end,
                key=lambda n: len(self.decode(completion.tokens[: n + 1])),
            )
            rewards[before + min(at, len(completion.tokens) - 1)] += value
        return sample.with_(token_rewards=rewards)

    def _total(
        self, completion: Completion, scores: Scores, i: int
    ) -> tuple[dict[str, float | None], float | None]:
        """The components and the weighted total of completion i."""
        return self.scorer.total(
            {name: values[i] for name, values in scores.items()}, len(completion.tokens)
        )


def _sample(
    uid: str,
    group: str,
    prompt: list[int],
    completion: Completion,
    components: dict[str, float | None],
    reward: float | None,
) -> Sample:
    before = len(prompt)
    length = len(prompt) + len(completion.tokens)
    logprobs = torch.zeros(length)
    versions = torch.full((length,), -1, dtype=torch.int32)
    logprobs[before:] = floats(completion.logprobs)
    versions[before:] = ints(completion.versions)
    trained: Any = torch.arange(length) >= before
    return Sample(
        uid=uid,
        group=group,
        episode=uid,
        tokens=ints(prompt + completion.tokens),
        trained=trained,
        logprobs=logprobs,
        versions=versions,
        rewards=components,
        reward=reward,
        stop=completion.stop if completion.tokens else Stop.ERROR,
    )
