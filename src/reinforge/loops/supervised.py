"""Training on given rows: the same backend, packing, checkpoints and metrics as RL.

The loss is passed in; it knows no names.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from reinforge.core.backend import Backend, Loss
from reinforge.core.batch import Totals
from reinforge.core.metrics import Metrics, average
from reinforge.core.prepare import prepared
from reinforge.core.sample import Sample
from reinforge.loops.expert_load import ExpertLoad
from reinforge.loops.open_step import PreparedStep, RunStep
from reinforge.loops.ptx import PretrainingMix
from reinforge.loops.run import Run
from reinforge.loops.step import TrainingStep
from reinforge.rollout.rows.sampler import RowSampler


@dataclass
class SupervisedTrainer:
    """A run on given rows with all its parts. build/ makes it; whoever starts it enters `run` and
    goes through `steps`.

    `row(i)` gives the samples of unit i (one text, or the two answers of a pair); rows are
    tokenised once and kept.
    """

    run: Run
    row_sampler: RowSampler
    backend: Backend
    loss: Loss
    row: Callable[[int], Sequence[Sample]]
    rows_per_step: int
    ptx: PretrainingMix | None = None  # pre-training text beside the rows
    experts: ExpertLoad = field(default_factory=ExpertLoad)

    async def steps(self) -> AsyncGenerator[RunStep, None]:
        """The run. Every step comes twice: open, when it has its rows, and done."""
        run = self.run
        await run.begin()
        while run.going():
            with run.phase("prepare"):
                rows = [
                    sample
                    for c in self.row_sampler.take(self.rows_per_step, run.step)
                    for sample in self.row(c.row)
                ]
            step = run.open_step(prepare=self._prepare, rows=rows)
            yield step
            await self._train(step)
            yield step
        await run.finish()

    def _prepare(self, step: RunStep) -> PreparedStep:
        with self.run.phase("annotate"):
            return PreparedStep([prepared(self.backend, self.loss, step.samples)])

    async def _train(self, step: RunStep) -> None:
        """Updates the weights with a step, and ends it."""
        run = self.run
        batches = [] if step.skipped else step.batches
        metrics: Metrics = {"train/empty": 1.0, "train/skipped": 0.0}
        reports = []
        with run.phase("train"):
            if not step.skipped:
                run.begin_digests(step)
                found = self.backend.forward_backward(batches, self.loss, Totals.of(batches))
                if self.ptx is not None:
                    found |= self.ptx.add()
                report = self.backend.step()
                reports.append(report)
                metrics = average([self.experts.finish(found) | report.metrics()])
                run.counters["updates"] = run.counters.get("updates", 0) + 1
        trained = sum(b.n_trained for b in batches)
        processed = sum(b.n_tokens for b in batches)
        run.counters["tokens_trained"] = run.counters.get("tokens_trained", 0) + trained
        metrics["tokens/trained"] = trained
        metrics["tokens/processed"] = processed
        metrics |= self.row_sampler.report(run.step)
        await run.end_step(step, TrainingStep(metrics, policy=reports, processed=processed))
