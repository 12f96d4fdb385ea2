"""What a callback is: a user's own code at the events of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from reinforge.core.metrics import Metrics
from reinforge.loops.control import RunControl
from reinforge.loops.open_step import RunStep


class Callback:
    """Code of a user's at the events of a run: derive from it, and write the methods that you want.
    `reinforge.train(callbacks=[...])` takes it, the run calls it.

    `run` tells where the run is, and can be asked to stop, save or evaluate. A method that raises
    ends the run, with an error that names it.
    """

    def on_begin(self, run: RunControl) -> None:
        """The run is open, at its first step or where it goes on."""

    def on_rollouts(self, run: RunControl, step: RunStep) -> None:
        """The answers of a step are there, with their scores."""

    def on_rewards(self, run: RunControl, step: RunStep) -> None:
        """Rewards may be changed now (`step.set_rewards`), or the step skipped."""

    def on_advantages(self, run: RunControl, step: RunStep) -> None:
        """Advantages may be changed now (`step.set_advantages`), or the step skipped."""

    def on_step(self, run: RunControl, step: RunStep) -> None:
        """The step is trained and logged. What `run` is asked for is done right after it."""

    def on_evaluation(self, run: RunControl, metrics: Metrics) -> None:
        """Held-out rows were evaluated."""

    def on_save(self, run: RunControl, path: Path) -> None:
        """A checkpoint is written."""

    def on_end(self, run: RunControl) -> None:
        """The run is over; `run.error` is None if it ended as it should."""


# a callback, a function that is called after every step, or a transformers.TrainerCallback
GivenCallback = Callback | Callable[[RunControl, RunStep], Any] | Any
GivenCallbacks = GivenCallback | Sequence[GivenCallback]
