"""The callbacks that a Python caller gave: made of what they are, and told what happens."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from reinforge.core.errors import InputError, StoppedByPolicy, Terminated
from reinforge.core.metrics import Metrics
from reinforge.loops.callbacks import Callback, GivenCallbacks
from reinforge.loops.control import RunControl
from reinforge.loops.open_step import RunStep

NEAR = 0.8  # of difflib: all events begin alike


class _AfterStep(Callback):
    """A plain function as a callback."""

    def __init__(self, function: Callable[[RunControl, RunStep], Any]):
        self.function = function

    def on_step(self, run: RunControl, step: RunStep) -> None:
        self.function(run, step)


class Callbacks:
    """All callbacks of a run, in the order in which they were given. The run and its loop tell it
    what happens.
    """

    def __init__(self, given: GivenCallbacks = ()):
        listed = given if isinstance(given, Iterable) else [given]
        self.listed = [(_name(item), _callback(item)) for item in listed]

    def begin(self, run: RunControl) -> None:
        self._tell("on_begin", run)

    def rollouts(self, run: RunControl, step: RunStep) -> None:
        self._tell("on_rollouts", run, step)
        self._tell("on_rewards", run, step)

    def advantages(self, run: RunControl, step: RunStep) -> None:
        self._tell("on_advantages", run, step)

    def step(self, run: RunControl, step: RunStep) -> None:
        self._tell("on_step", run, step)

    def evaluation(self, run: RunControl, metrics: Metrics) -> None:
        self._tell("on_evaluation", run, dict(metrics))

    def save(self, run: RunControl, path: Path) -> None:
        self._tell("on_save", run, path)

    def end(self, run: RunControl) -> None:
        self._tell("on_end", run)

    def _tell(self, event: str, *what: Any) -> None:
        for name, callback in self.listed:
            try:
                getattr(callback, event)(*what)
            except (StoppedByPolicy, Terminated):
                raise
            except Exception as error:
                at = traceback.extract_tb(error.__traceback__)[-1]
                raise InputError(
                    f"{name}.{event} raised {type(error).__name__}: {error}"
                    f" ({Path(at.filename).name}:{at.lineno}).",
                    where="callbacks",
                    fix="Repair it, or leave it out.",
                ) from error


def _callback(item: Any) -> Callback:
    if isinstance(item, Callback):
        _check_events(type(item))
        return item
    if hasattr(item, "on_train_begin"):
        from reinforge.loops.trainer_callbacks import HuggingFaceCallback

        return HuggingFaceCallback(item() if isinstance(item, type) else item)
    if callable(item) and not isinstance(item, type):
        return _AfterStep(item)
    raise InputError(
        f"{item!r} is no callback.",
        where="callbacks",
        fix=(
            "Give objects of classes that derive from reinforge.Callback, functions (run, step), or"
            " callbacks of transformers."
        ),
    )


def _check_events(kind: type[Callback]) -> None:
    """A method that is called like an event and is none would never be called. A class that is a
    callback of transformers too has its events as well.
    """
    if any(base.__name__ == "TrainerCallback" for base in kind.__mro__):
        return
    events = [name for name in vars(Callback) if name.startswith("on_")]
    for name in dir(kind):
        if name.startswith("on_") and name not in events and callable(getattr(kind, name)):
            near = difflib.get_close_matches(name, events, 1, NEAR)
            raise InputError(
                f"{kind.__name__}.{name} is no event.",
                where="callbacks",
                fix=f"Did you mean {near[0]}?" if near else f"There are: {', '.join(events)}.",
            )


def _name(item: Any) -> str:
    named = getattr(item, "__name__", None)
    return str(named) if named is not None else type(item).__name__
