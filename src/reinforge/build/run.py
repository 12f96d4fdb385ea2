"""One config, run to its end: what the Python interface, the command line, the stages of a pipeline
and `reinforge check` all call.

Nothing heavy is imported with this module: the screen says something first.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from reinforge.config.schema import Config
from reinforge.core.aio import run_sync

if TYPE_CHECKING:
    from reinforge.build.attempt import Attempt
    from reinforge.build.caller_objects import CallerObjects
    from reinforge.build.factories import Factories
    from reinforge.loops.run import Run
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
    from reinforge.watch.view import View

    view = view or View()
    view.doing("loading torch and transformers")
    from reinforge.build.attempt import Attempt
    from reinforge.build.caller_objects import CallerObjects
    from reinforge.build.local import LocalFactories
    from reinforge.build.ranks import open_ranks

    given = given or CallerObjects()
    try:
        if config.cluster.kind == "ray":
            from reinforge.build.ray_run import run_on_ray

            run = run_on_ray(config, given, view, _execute)
        else:
            with open_ranks(config):
                run = _execute(config, given, view, Attempt(), LocalFactories(given.model))
    finally:
        view.stop()
    return RunResult(run.dir, run.last, run.step, run.stopped, run.report)


def _execute(
    config: Config, given: CallerObjects, view: ViewLike, attempt: Attempt, factories: Factories
) -> Run:
    """The run that the config describes, to its end."""
    from reinforge.build.trainer import build
    from reinforge.loops.rl import RLTrainer

    trainer = build(config, view, given, attempt, factories)
    run = trainer.run
    attempt.run_made(run)

    async def go() -> None:
        with run:
            attempt.run_opened(run)
            await trainer.train()

    try:
        run_sync(go(), run.terminate)
    finally:
        if isinstance(trainer, RLTrainer):
            trainer.engine.close()
    return run
