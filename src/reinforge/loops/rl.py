"""THE loop.

It knows rows, groups, batches and an algorithm made of functions; it never asks which algorithm it
runs.

One step: collect groups, pack, annotate with what the algorithm needs, compute advantages over the
whole batch, then one or more optimizer steps whose denominators were counted before anything was
cut; publish the new weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from reinforge.algorithms.algorithm import Algorithm
from reinforge.algorithms.losses import value
from reinforge.algorithms.parts import corrections
from reinforge.core.backend import Backend
from reinforge.core.batch import Batch, Totals, domain_tokens, pack
from reinforge.core.engine import Engine, GenerationStats
from reinforge.core.errors import Terminated
from reinforge.core.metrics import Metrics, StepMetrics, average
from reinforge.core.report import StepReport
from reinforge.core.sample import Group, Sample
from reinforge.core.signal import signal_share, why_masked, with_signal
from reinforge.core.threads import in_thread
from reinforge.loops.config_changes import less_room
from reinforge.loops.critic import Critic
from reinforge.loops.expert_load import ExpertLoad
from reinforge.loops.open_step import PreparedStep, RunStep
from reinforge.loops.ptx import PretrainingMix
from reinforge.loops.run import Run
from reinforge.loops.step import TrainingStep
from reinforge.loops.trace import StepTrace, Tracer
from reinforge.rewards.normalization import RewardNormalization
from reinforge.rollout.buffer import RolloutBuffer
from reinforge.rollout.kept import KeptRollouts
from reinforge.rollout.source import GroupSource, RolloutBatch, rollout_metrics

OF_ENGINE = "engine/"  # counters of the run that are the engine's
PATIENCE = 20.0  # seconds that a run which is asked to end waits for rollouts under way


@dataclass
class RLTrainer:
    """An RL run with all its parts. `build_rl` makes it; whoever starts it enters `run` and goes
    through `steps`.
    """

    run: Run
    source: GroupSource
    buffer: RolloutBuffer  # runs the source, ahead of training where it may
    backend: Backend
    engine: Engine
    algorithm: Algorithm
    max_new_tokens: int
    reward_weights: dict[str, float]
    epochs: int = 1
    minibatches: int = 1
    critic: Critic | None = None
    running: RewardNormalization = field(
        default_factory=lambda: RewardNormalization({})
    )  # statistics of rewards
    ptx: PretrainingMix | None = None  # pre-training text in every optimizer step of the policy
    experts: ExpertLoad = field(default_factory=ExpertLoad)
    skip_idle: bool = True  # rows without gradient are not computed
    tracer: Tracer | None = None  # records for people what steps did
    kept: KeptRollouts | None = None  # where the rollouts of every step are kept, if they are

    async def steps(self) -> AsyncGenerator[RunStep, None]:
        """The run. Every step comes twice: open, when it has rollouts and rewards, and done."""
        run = self.run
        try:
            self._settle_engine()
            await self.engine.update(self.backend.weights(), self._version())
            await run.begin()
            while run.going():
                before = self._engine_stats()
                rollouts = await self._collect()
                if self.kept is not None:
                    self.kept.write(run.step + 1, rollouts, run.cursor.taken)
                step = run.open_step(
                    prepare=self._prepare, rollouts=rollouts, measure=partial(self._seen, rollouts)
                )
                run.callbacks.rollouts(run.control, step)
                yield step
                await self._train(step, rollouts, before)
                yield step
            await run.finish()
        except Terminated:
            await self.buffer.cut_unfinished()
            await run.settle(PATIENCE)
            raise
        finally:
            await self.buffer.close()

    async def _collect(self) -> RolloutBatch:
        """The rollouts of a step, with their rewards."""
        run = self.run
        with run.phase("generate"):
            await run.interruptible(self.buffer.advance(run.step, self._version()))
            if self.buffer.due == "training":
                self._record_engine()
                await self.engine.sleep()
        # everything is generated, and the device has nothing to do
        with run.phase("reward_wait"):
            return await run.interruptible(self.buffer.take(run.step))

    def _prepare(self, step: RunStep) -> PreparedStep:
        """Packs, annotates and computes advantages."""
        run = self.run
        with run.phase("prepare"):
            minibatches = self._pack(step.groups)
            batches = [batch for minibatch in minibatches for batch in minibatch]
        with run.phase("annotate"):
            needs = self.algorithm.needs
            if self.critic is not None:
                self.critic.annotate(batches)
                needs -= {"values"}
            self.backend.annotate(batches, needs)
            return PreparedStep(minibatches, self.algorithm.advantages(batches))

    async def _train(self, step: RunStep, rollouts: RolloutBatch, before: GenerationStats) -> None:
        """Updates the weights with a step, publishes them, and ends the step. `before`: what the
        engine had done when the step began.
        """
        run = self.run
        prepared = PreparedStep([])
        if not step.skipped:
            prepared = await self._aside(lambda: step.prepared)
        self.source.commit(rollouts, run.step, self._version())
        trace = None
        if self.tracer is not None:
            # of every step: any may turn out to be the last
            trace = self.tracer.begin(
                rollouts,
                prepared.minibatches,
                step.changed,
                asks_loss=run.records(step.number),
            )
        with run.phase("train"):
            updates = Updates()
            if not step.skipped:
                run.begin_digests(step)
                updates = await self._aside(self._update, prepared.minibatches, trace)
            metrics = updates.metrics() | prepared.measured
            if not self._waits() and not step.skipped:
                metrics |= self.algorithm.adapt(metrics)
        await self._until_generated()
        generated = self._engine_stats().since(before)
        await self.engine.update(self.backend.weights(), self._version())
        metrics |= self._seen(rollouts)
        metrics |= self.engine.measured
        metrics |= self._count([] if step.skipped else step.batches, rollouts)
        processed = sum(updates.processed) / self.epochs
        metrics["tokens/processed"] = processed
        if generated.seconds:
            metrics["efficiency/engine_seconds"] = generated.seconds
        if generated.preemptions:
            metrics["efficiency/preemptions"] = generated.preemptions
        if generated.draft_steps:
            length = generated.draft_tokens / generated.draft_steps
            metrics["efficiency/accepted_length"] = length
        self.running.observe(s for g in [*rollouts.groups, *rollouts.discarded] for s in g.episodes)
        done = TrainingStep(
            metrics=metrics,
            policy=updates.policy,
            critic=updates.critic,
            processed=processed,
            unscored=rollouts.unscored and not step.skipped,
            faults=rollouts.faults,
        )
        record = None
        if trace is not None:
            record = partial(trace.record, done.skipped, metrics.get("train/loss"))
        await run.end_step(step, done, rollouts.groups, record)

    def _seen(self, rollouts: RolloutBatch) -> Metrics:
        """What the rollouts of a step looked like."""
        return rollout_metrics(rollouts, self.reward_weights, self.source.components)

    async def _aside(self, work: Callable[..., Any], *given: Any) -> Any:
        """Where an engine generates meanwhile, in a thread: its answers are heard, and its episodes
        go on.
        """
        if self.buffer.due == "training":
            return work(*given)
        return await in_thread(work, *given)

    async def _until_generated(self) -> None:
        """Before the engine gets new weights: one in this process has what it was asked for."""
        if self.buffer.due != "update":
            return
        with self.run.phase("generate"):
            try:
                await self.run.interruptible(self.buffer.until_generated())
            except Terminated as ended:
                # the weights have moved: the step ends as it would have ended, or has not been
                try:
                    async with asyncio.timeout(PATIENCE) as patience:
                        await self.buffer.until_generated()
                except TimeoutError:
                    if not patience.expired():  # it is a rollout's own
                        raise
                    self.run.leave_step(PATIENCE)
                    raise ended from None
        self._record_engine()

    def _settle_engine(self) -> None:
        """A resumed run schedules as it did: the engine gets back what its scheduling
        depends on.
        """
        saved = {
            name.removeprefix(OF_ENGINE): value
            for name, value in self.run.counters.items()
            if name.startswith(OF_ENGINE)
        }
        if saved and not less_room(self.run.changes):
            self.engine.load(saved)
        self._record_engine()

    def _record_engine(self) -> None:
        """Once more after each rollout: a cache that found no room has become smaller."""
        state = self.engine.state()
        self.run.counters.update({OF_ENGINE + name: value for name, value in state.items()})

    def _engine_stats(self) -> GenerationStats:
        """What the engine has done so far, where it counts that."""
        stats = self.engine.stats
        return GenerationStats() if stats is None else replace(stats)

    def _version(self) -> int:
        """Weights are counted by optimizer steps."""
        return self.run.counters.get("updates", 0)

    def _pack(self, groups: list[Group]) -> list[list[Batch]]:
        """Whole groups into `minibatches` parts of like size, each packed by the token budget."""
        samples = [[trainable(s, self.algorithm.overlong) for s in g.samples] for g in groups]
        if (pick := self.algorithm.pick) is not None:
            samples = [
                kept
                for g, own in zip(groups, samples, strict=True)
                if (kept := pick(replace(g, samples=own)))
            ]
        parts = [samples[i :: self.minibatches] for i in range(self.minibatches)]
        return [
            pack(
                [s for group in part for s in group],
                self.backend.budget,
                unit=self.algorithm.loss.unit,
                share=self.backend.share,
            )
            for part in parts
            if part
        ]

    def _update(self, minibatches: list[list[Batch]], trace: StepTrace | None = None) -> Updates:
        """`trace` is told what the first update of every sample did."""
        updates = Updates()
        for epoch in range(self.epochs):
            for minibatch in minibatches:
                totals = Totals.of(minibatch, self.max_new_tokens)
                told = trace if epoch == 0 else None
                metrics: StepMetrics = {}
                if not self._waits():
                    metrics |= self._policy_step(minibatch, totals, updates, told)
                if self.critic is not None:
                    found, report = self.critic.update(minibatch, totals)
                    metrics |= found
                    updates.critic.append(report)
                updates.measured.append(metrics)
        return updates

    def _waits(self) -> bool:
        """Whether only the critic is trained in this step."""
        return self.critic is not None and self.critic.warming(self.run.step)

    def _policy_step(
        self,
        minibatch: list[Batch],
        totals: Totals,
        updates: Updates,
        trace: StepTrace | None = None,
    ) -> StepMetrics:
        """One optimizer step of the policy: its metrics. What it did is added to `updates`."""
        if self.skip_idle and self.algorithm.idle:
            minibatch = with_signal(minibatch, self.backend.budget, share=self.backend.share)
            totals = replace(totals, left_out=totals.tokens - sum(b.n_trained for b in minibatch))
            totals = replace(totals, domain_tokens=domain_tokens(minibatch))
        if trace is not None:
            totals = replace(totals, traced=trace.slots)
        metrics = self.backend.forward_backward(minibatch, self.algorithm.loss, totals)
        if trace is not None:
            trace.add_loss_metrics(metrics, totals)
        if self.ptx is not None:
            metrics |= self.ptx.add()
        self.run.counters["updates"] = self.run.counters.get("updates", 0) + 1
        report = self.backend.step()
        updates.policy.append(report)
        updates.processed.append(sum(b.n_tokens for b in minibatch))
        metrics = self.experts.finish(value.finish(corrections.finish(metrics)))
        return {**metrics, **report.metrics()}

    def _count(self, batches: list[Batch], rollout_batch: RolloutBatch) -> Metrics:
        """Sampled, replayed and given tokens are trained or dropped, and the books balance."""
        trained = sum(b.n_trained for b in batches)
        sampled = rollout_batch.sampled_tokens
        counters = self.run.counters
        counters["tokens_sampled"] = counters.get("tokens_sampled", 0) + sampled
        counters["tokens_trained"] = counters.get("tokens_trained", 0) + trained
        brought = rollout_batch.replayed_tokens + rollout_batch.given_tokens
        found: Metrics = {
            "tokens/trained": trained,
            "tokens/dropped": sampled + brought - trained,
        }
        if self.algorithm.pick is not None:
            samples = sum(len(b.samples) for b in batches)
            found["batch/units"] = samples / self.algorithm.loss.unit
        share = signal_share(batches)
        if share is not None:
            found["batch/signal"] = share
        return found


@dataclass
class Updates:
    """What the optimizer steps of one training step did, one after the other: the RL loop fills it
    while it trains.
    """

    policy: list[StepReport] = field(default_factory=list)
    critic: list[StepReport] = field(default_factory=list)
    measured: list[StepMetrics] = field(default_factory=list)  # of each, for people
    processed: list[int] = field(default_factory=list)  # tokens, of each of the policy's

    def metrics(self) -> Metrics:
        """Of all of them as one."""
        if not self.measured:  # dynamic sampling found no group with signal
            return {"train/empty": 1.0, "train/skipped": 0.0}
        return average(self.measured)


def trainable(sample: Sample, overlong: str) -> Sample:
    """The sample with nothing to train where it must not be: unscored, failed, or truncated under
    `overlong: mask`. It keeps its place in the group, so statistics still count it.
    """
    if why_masked(sample, overlong) is None:
        return sample
    return sample.with_(trained=torch.zeros_like(sample.trained))
