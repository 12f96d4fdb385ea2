"""The critic of an RL run: a second model with its own optimizer that learns what to expect, and
says so before every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reinforge.algorithms.losses.value import finish
from reinforge.core.backend import Backend, Loss, State
from reinforge.core.batch import Batch, Totals
from reinforge.core.metrics import Metric, Reduction, StepMetrics
from reinforge.core.report import StepReport


@dataclass
class Critic:
    """The critic of an RL run: `backend` trains a `ScalarModel` with `loss`. build/critic.py makes
    it; the RL loop asks it for values and trains it.

    In the first `warmup` steps of the run only the critic is trained: advantages from a critic that
    knows nothing would teach the policy nothing. A part of the run: saved and restored with it.
    """

    backend: Backend
    loss: Loss
    warmup: int = 0

    def annotate(self, batches: Sequence[Batch]) -> None:
        """Fills the stream `values`, and the bootstrap of samples that the token limit cut off."""
        self.backend.annotate(batches, frozenset({"values"}))

    def update(self, minibatch: Sequence[Batch], totals: Totals) -> tuple[StepMetrics, StepReport]:
        """One optimizer step towards the stream `returns`.

        A step that had to be skipped counts as a bad step of the run.
        """
        metrics = finish(self.backend.forward_backward(minibatch, self.loss, totals))
        report = self.backend.step()
        own = {
            f"critic/{name.removeprefix('train/')}": value
            for name, value in metrics.items()
            if name.startswith("train/")
        }
        rest = {name: value for name, value in metrics.items() if not name.startswith("train/")}
        found = own | report.metrics("critic") | rest
        if report.skipped:
            found["train/skipped"] = Metric(1.0, Reduction.MAX)
        return found, report

    def warming(self, step: int) -> bool:
        """Whether the policy still waits in step number `step` (from 0)."""
        return step < self.warmup

    def state(self) -> State:
        return self.backend.state()

    def load(self, state: State) -> None:
        self.backend.load(state)
