"""Pre-training text in every optimizer step: the ptx term of InstructGPT (2203.02155)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reinforge.algorithms.losses.supervised import PretrainingLoss
from reinforge.core.backend import Backend, State
from reinforge.core.batch import Totals, pack
from reinforge.core.metrics import StepMetrics
from reinforge.data.cursor import Cursor
from reinforge.data.units import Unit


@dataclass
class PretrainingMix:
    """Blocks of pre-training text, some of which are added to every optimizer step. build/ makes it
    where there is a section `ptx`; a loop calls `add` after its own pass and before the step.
    """

    backend: Backend
    units: Sequence[Unit]
    cursor: Cursor
    blocks: int  # in every optimizer step
    loss: PretrainingLoss

    def add(self) -> StepMetrics:
        """Adds the gradient of the next blocks to what the backend has."""
        samples = [sample for i in self.cursor.take(self.blocks) for sample in self.units[i]]
        batches = pack(samples, self.backend.budget, share=self.backend.share)
        found = self.backend.forward_backward(batches, self.loss, Totals.of(batches))
        return {name: value for name, value in found.items() if name.startswith("ptx/")}

    def state(self) -> State:
        return State(meta=self.cursor.state())

    def load(self, state: State) -> None:
        self.cursor.load(state.meta)
