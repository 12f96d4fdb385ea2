"""One config, run step by step or to its end: what the Python interface, the command line, the
stages of a pipeline and `reinforge check` all call.

Nothing heavy is imported with this module: the screen says something first.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Coroutine, Generator, Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from reinforge.build.caller_objects import CallerObjects
from reinforge.build.result import RunResult
from reinforge.config.schema import Config
from reinforge.core.errors import InputError, StoppedByPolicy
from reinforge.loops.finished import FinishedRun, finished_run
from reinforge.watch.default_view import default_view
from reinforge.watch.ending import REPORT, describe_end

if TYPE_CHECKING:
    from reinforge.build.execute import OpenRun
    from reinforge.loops.open_step import RunStep
    from reinforge.loops.run import Run
    from reinforge.loops.view import ViewLike

T = TypeVar("T")


class ConfigTrainer:
    """A run of a config that is gone through step by step. `train_config` makes it, and
    `reinforge.Trainer` is one.

    The run opens when something is first asked of it. Its signals, lock and logs are there until it
    is closed, or has ended; closing it before that saves a checkpoint.
    """

    def __init__(
        self, config: Config, given: CallerObjects | None = None, view: ViewLike | None = None
    ):
        self.config = config
        self._given = given or CallerObjects()
        self._view = view or default_view()
        self._items: Generator[OpenRun | RunStep, None, None] | None = None
        self._open: OpenRun | None = None
        self._step: RunStep | None = None  # the one that is in the caller's hands
        self._again: RunStep | None = None  # the next one, where that one was cut
        self._ended = False
        self._dir_made_up = False  # the same call would begin another run

    # ---- steps ----

    def __iter__(self) -> Iterator[RunStep]:
        """The steps that are left, each before its update. It is trained when the next one is asked
        for, unless the caller has done so (`step.update()`). A loop that was left can be taken up
        again.
        """
        while (step := self._next()) is not None:
            yield step

    def run(self) -> RunResult:
        """All steps that are left; then the run is closed. Where none is left nothing is loaded,
        unless a model or callbacks were given as objects.
        """
        if (done := self._finished_before()) is not None:
            return self._tell_finished(done)
        for _ in self:
            pass
        return self.result

    def _finished_before(self) -> FinishedRun | None:
        given = self._given
        if self._items is not None or given.module is not None or given.callbacks:
            return None
        config, _ = given.described(self.config)
        return finished_run(config)

    def _tell_finished(self, done: FinishedRun) -> RunResult:
        self._view.message(done.told)
        self._view.message(describe_end(done.dir))
        self._view.stop()
        report = done.dir / REPORT
        return RunResult(
            done.dir, done.metrics, done.step, done.stopped, report if report.exists() else None
        )

    def _next(self) -> RunStep | None:
        """The next step that is open; None when the run has ended."""
        self._finish_step()
        step = self._again or self._advance()
        self._again = None
        if step is not None:
            assert not step.done
            step.on_update(partial(self._update, step))
        self._step = step
        return step

    def _update(self, step: RunStep) -> None:
        """Trains a step, on its own request."""
        if step is not self._step:
            raise InputError(
                f"the run has ended before step {step.number} was trained.",
                where="step.update",
                fix="Make a new trainer: it continues from the newest checkpoint.",
            )
        self._finish_step()
        if not step.done:
            raise InputError(
                f"step {step.number} was cut: what trained it was lost, and was made again.",
                where="step.update",
                fix="Ask the trainer for its next step: what was cut comes again, with its draws.",
            )

    def _finish_step(self) -> None:
        """Trains the step that is in the caller's hands. Where it was cut (on Ray an actor may be
        lost, and the run goes on from its newest checkpoint), the step that comes instead is the
        next one.
        """
        step = self._step
        if step is None or step.done:
            return
        found = self._advance()
        if found is not step:
            self._again = found
            self._step = None
        assert found is not step or step.done

    def _advance(self) -> RunStep | None:
        """What the run does next; None when it has ended."""
        self._begin()
        assert self._items is not None
        if self._ended:
            return None
        try:
            for item in self._items:
                step = self._taken(item)
                if step is not None:
                    return step
        except BaseException:
            self._end()
            raise
        self._end()
        return None

    def _taken(self, item: OpenRun | RunStep) -> RunStep | None:
        """The step; None for a run that has opened (on Ray, once more)."""
        from reinforge.build.execute import OpenRun

        if isinstance(item, OpenRun):
            self._open = item
            return None
        return item

    def _begin(self) -> None:
        """Opens the run, unless it is."""
        if self._items is not None:
            return
        self._view.doing("loading torch and transformers")
        from reinforge.build.execute import execute

        self._items = execute(self.config, self._given, self._view)
        atexit.register(self._abandon)
        try:
            self._taken(next(self._items))
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        self._ended = True
        self._step = None
        atexit.unregister(self._abandon)
        self._view.stop()

    # ---- between steps ----

    def stop(self, reason: str = "") -> None:
        """The step in hand is the last: the run ends after it, with an evaluation, a checkpoint and
        a report. The same call continues it.
        """
        self._opened().run.stop(reason)

    def save(self) -> Path:
        """Finishes the step in hand and saves a checkpoint; returns where it is."""
        self._finish_step()
        return self._ask("save", lambda run: run.save())

    def evaluate(self) -> dict[str, float]:
        """Finishes the step in hand and scores the held-out rows."""
        self._finish_step()
        return self._ask("evaluate", lambda run: run.evaluate())

    def _ask(self, what: str, work: Callable[[Run], Coroutine[Any, Any, T]]) -> T:
        opened = self._opened()
        if self._ended:
            raise InputError(
                f"the run in {opened.run.dir} has ended.",
                where=f"trainer.{what}",
                fix="Ask while it is open; make a new trainer to continue it.",
            )
        return opened.loop.run(work(opened.run))

    def _opened(self) -> OpenRun:
        self._begin()
        assert self._open is not None
        return self._open

    # ---- what it is ----

    @property
    def step(self) -> int:
        """Steps that are done."""
        return self._opened().run.step

    @property
    def total(self) -> int:
        """Steps of the run."""
        return self._opened().run.total

    @property
    def metrics(self) -> dict[str, float]:
        """The newest value of each."""
        return dict(self._opened().run.last)

    @property
    def result(self) -> RunResult:
        """What the run has come to; of one that is open, so far."""
        run = self._opened().run
        module = self._given.module
        if self.config.adapter is not None and not hasattr(module, "peft_config"):
            module = None  # it was the base of what was trained
        return RunResult(run.dir, run.last, run.step, run.stopped, run.report, module)

    def __repr__(self) -> str:
        where = f"run {self.config.run.dir}"
        if self._open is None:
            return f"<{type(self).__name__} of {where}, not begun>"
        run = self._open.run
        ended = ", ended" if self._ended else ""
        return f"<{type(self).__name__} of {where}, step {run.step} of {run.total}{ended}>"

    # ---- end ----

    def close(self) -> None:
        """Ends the run: the step in hand is trained, and what is due at an end is done. Nothing
        where the run has not begun, or has ended.
        """
        if self._items is None or self._ended:
            return
        self.stop("closed")
        while self._next() is not None:
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._throw(error)

    def _throw(self, error: BaseException) -> None:
        """The run ends with the error: nothing more is trained, and its newest checkpoint is the
        one to continue from.
        """
        if self._items is None or self._ended:
            return
        try:
            self._items.throw(error)
        except BaseException as raised:
            if raised is not error:
                raise
        finally:
            self._end()

    def _abandon(self) -> None:
        """The program ends, and nobody has closed the trainer."""
        self._throw(
            StoppedByPolicy(f"the program ended while this run was open. {self._what_is_left()}")
        )

    def _what_is_left(self) -> str:
        from reinforge.checkpoint import store

        folder = self.config.run.dir
        if store.latest(Path(folder)) is None:
            return "Nothing was saved yet: close the trainer, or use it as a context manager."
        if self._dir_made_up:
            return f"Its newest checkpoint is intact: give dir={folder!r} to continue from it."
        return "Its newest checkpoint is intact: the same call continues from it."


def train_config(
    config: Config, given: CallerObjects | None = None, view: ViewLike | None = None
) -> RunResult:
    """Runs one config to its end, or on from where it stopped. Every ending leaves a report."""
    return ConfigTrainer(config, given, view).run()
