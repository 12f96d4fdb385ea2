"""One config, run to its end: what the Python interface, the command line, the stages of a pipeline
and `reinforge check` all call.

Nothing heavy is imported with this module: the screen says something first.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from reinforge.build.caller_objects import CallerObjects
from reinforge.config.schema import Config
from reinforge.watch.view import View

if TYPE_CHECKING:
    from reinforge.loops.view import ViewLike


@dataclass(frozen=True)
class RunResult:
    """What `train_config` and `reinforge.train` return about a run that has ended."""

    run_dir: Path
    metrics: dict[str, float]  # the newest value of each
    steps: int
    stopped: str | None = None  # why it ended before its time
    report: Path | None = None


def train_config(
    config: Config, given: CallerObjects | None = None, view: ViewLike | None = None
) -> RunResult:
    """Runs one config to its end, or on from where it stopped. Every ending leaves a report."""
    view = view or View()
    view.doing("loading torch and transformers")
    from reinforge.build.execute import execute

    try:
        run = execute(config, given or CallerObjects(), view)
    finally:
        view.stop()
    return RunResult(run.dir, run.last, run.step, run.stopped, run.report)
