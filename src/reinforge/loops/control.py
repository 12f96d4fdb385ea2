"""What a callback may know of a run, and ask of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from reinforge.config.schema import Config
from reinforge.core.metrics import Metrics
from reinforge.data.cursor import Cursor
from reinforge.loops.checkpointer import Checkpointer
from reinforge.loops.evaluator import Evaluator


class ControlledRun(Protocol):
    """What `RunControl` needs of a run."""

    cfg: Config
    dir: Path
    step: int
    total: int
    cursor: Cursor
    last: Metrics
    stopped: str | None
    evaluator: Evaluator
    checkpointer: Checkpointer

    def stop(self, reason: str = "") -> None: ...

    def ask_save(self) -> None: ...

    def ask_evaluation(self) -> None: ...


class RunControl:
    """A run as its callbacks see it: where it is, and what it can be asked for. The run makes it.

    What is asked for is done at the end of the step that is under way.
    """

    def __init__(self, run: ControlledRun):
        self._run = run
        self.error: BaseException | None = None  # what the run ended with

    def __repr__(self) -> str:
        return f"<run {self.dir.name}, step {self.step} of {self.total}>"

    @property
    def config(self) -> Config:
        """What the run was made from."""
        return self._run.cfg

    @property
    def dir(self) -> Path:
        """Where the run is written."""
        return self._run.dir

    @property
    def step(self) -> int:
        """Steps that are done."""
        return self._run.step

    @property
    def total(self) -> int:
        """Steps of the run."""
        return self._run.total

    @property
    def epoch(self) -> float:
        """Passes over the rows."""
        return self._run.cursor.epoch

    @property
    def metrics(self) -> Metrics:
        """The newest value of each."""
        return dict(self._run.last)

    @property
    def stopped(self) -> str | None:
        """Why the run ends before its time."""
        return self._run.stopped

    @property
    def model(self) -> Any:
        """The module that is trained, where it is in this process; else None."""
        return self._run.checkpointer.backend.weights().module

    @property
    def can_evaluate(self) -> bool:
        """Whether rows are held out."""
        return self._run.evaluator.evaluate is not None

    def stop(self, reason: str = "") -> None:
        """Ends the run after this step: with an evaluation, a checkpoint and a report."""
        self._run.stop(reason)

    def save(self) -> None:
        """Asks for a checkpoint after this step."""
        self._run.ask_save()

    def evaluate(self) -> None:
        """Asks for an evaluation after this step."""
        self._run.ask_evaluation()
