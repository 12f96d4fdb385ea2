"""Single-turn rollouts: one prompt, n completions, scored.

The trained ids are the sampled ids; text is only for rewards.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from reinforge.core.engine import Completion, Engine, Sampling
from reinforge.core.env import RolloutContext
from reinforge.core.sample import Group, Row, Sample, Stop
from reinforge.core.seeds import seed_of
from reinforge.rewards.function import FunctionReward
from reinforge.rewards.normalization import RewardNormalization
from reinforge.rollout.baseline import greedy_name, greedy_sampling, with_baseline
from reinforge.rollout.first_finished import all_finished
from reinforge.rollout.generation_done import Countdown
from reinforge.rollout.journal import Journal, Scores
from reinforge.rollout.scoring import RewardScorer
from reinforge.rollout.texts import TextThread
from reinforge.rollout.track import TokenTrack

LONG = 4096  # tokens of a group whose texts are worth a thread


@dataclass(frozen=True, slots=True)
class ScoredAnswers:
    """Completions of one prompt, their texts and scores. `SingleTurn` makes a group of it."""

    completions: list[Completion]
    texts: list[str]
    scores: Scores


class SingleTurn:
    """A `Rollout`: the policy answers a prompt n times. Group sources and evaluations call it.

    Draws depend on (seed, purpose, name of the group) and nothing else.
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
        running: RewardNormalization | None = None,
        decode_all: Callable[[Sequence[Sequence[int]]], list[str]] | None = None,
    ):
        self.engine = engine
        self.encode = encode
        self.decode = decode
        # of the answers to a prompt, where that is quicker than one by one
        self.decode_all = decode_all or (lambda answers: [decode(tokens) for tokens in answers])
        # while texts are made others are scored; in order, so that groups are done in the order in
        # which they were generated
        long = n * sampling.max_new_tokens >= LONG
        self._texts = TextThread(self.decode_all) if long else None
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

    async def __call__(self, row: Row, context: RolloutContext) -> Group:
        prompt = self.encode(row)
        if self.greedy_baseline:
            return await self._against_greedy(row, context, prompt)
        answers = await self._sampled(row, context, prompt)
        return self._group(row, context.group, prompt, answers)

    async def _against_greedy(self, row: Row, context: RolloutContext, prompt: list[int]) -> Group:
        group = context.group
        context = replace(context, generated=Countdown(2, context.generated))
        greedy = self._answer(
            row,
            context,
            prompt,
            name=greedy_name(group),
            sampling=greedy_sampling(self.sampling),
            key=seed_of(self.seed, "baseline", group),
            n=1,
        )
        # at once: the engine batches them, and a failure of one cancels the other
        answers, baseline = await all_finished([self._sampled(row, context, prompt), greedy])
        [likeliest] = baseline.completions
        _, reward = self._total(likeliest, baseline.scores, 0)
        made = self._group(row, group, prompt, answers)
        return replace(
            made,
            samples=with_baseline(made.samples, reward),
            extra_tokens=len(likeliest.tokens),
        )

    async def _sampled(self, row: Row, context: RolloutContext, prompt: list[int]) -> ScoredAnswers:
        key = seed_of(self.seed, self.purpose, context.group)
        return await self._answer(
            row,
            context,
            prompt,
            name=context.group,
            sampling=self.sampling,
            key=key,
            n=self.n,
        )

    async def scored(
        self, row: Row, group: str, prompt: list[int], completions: list[Completion]
    ) -> Group:
        """The group that these completions are, whoever wrote them."""
        return self._group(row, group, prompt, await self._score(row, group, completions))

    async def _answer(
        self,
        row: Row,
        context: RolloutContext,
        prompt: list[int],
        *,
        name: str,
        sampling: Sampling,
        key: int,
        n: int,
    ) -> ScoredAnswers:
        engine = context.engine or self.engine
        completions = await engine.generate(prompt, sampling, key=key, n=n)
        context.generated()
        return await self._score(row, name, completions)

    async def _score(self, row: Row, name: str, completions: list[Completion]) -> ScoredAnswers:
        tokens = [c.tokens for c in completions]
        if self._texts is None:
            texts = self.decode_all(tokens)
        else:
            texts = await self._texts.of(tokens)
        ids = [c.tokens if c.sampled is None else c.sampled.ids.data for c in completions]
        scores = await self.scorer.score([row] * len(texts), name, tokens, texts, ids=ids)
        return ScoredAnswers(completions, texts, scores)

    def _group(self, row: Row, group: str, prompt: list[int], answers: ScoredAnswers) -> Group:
        samples = self._samples(row, group, prompt, answers)
        faults, why = self.scorer.faults(group)
        return Group(row, samples, answers.texts, faults=faults, why=why)

    def _samples(
        self, row: Row, group: str, prompt: list[int], answers: ScoredAnswers
    ) -> list[Sample]:
        samples = []
        for i, completion in enumerate(answers.completions):
            track = TokenTrack()
            track.give(prompt)
            track.take(completion)
            components, reward = self._total(completion, answers.scores, i)
            uid = f"{group}#{i}"
            samples.append(
                track.sample(
                    uid,
                    group=group,
                    episode=uid,
                    rewards=components,
                    reward=reward,
                    stop=completion.stop if completion.tokens else Stop.ERROR,
                )
            )
        if not self.by_step:
            return samples
        steps = self.scorer.steps([row] * len(samples), answers.texts)
        return [
            self._with_steps(*each, len(prompt))
            for each in zip(samples, answers.completions, steps, strict=True)
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
