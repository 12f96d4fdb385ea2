"""One config becomes a run, which is run to its end: in this process and its ranks, or on Ray.

The heavy half of `build/run.py`: torch and transformers come with this module.
"""

from __future__ import annotations

from reinforge.build.attempt import Attempt
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.factories import Factories
from reinforge.build.local import LocalFactories
from reinforge.build.ranks import open_ranks
from reinforge.build.trainer import build
from reinforge.config.schema import Config
from reinforge.core.aio import run_sync
from reinforge.loops.rl import RLTrainer
from reinforge.loops.run import Run
from reinforge.loops.view import ViewLike


def execute(config: Config, given: CallerObjects, view: ViewLike) -> Run:
    """The run that the config describes, to its end."""
    if config.cluster.kind == "ray":
        from reinforge.build.ray_run import run_on_ray

        return run_on_ray(config, given, view, _attempt)
    with open_ranks(config):
        return _attempt(config, given, view, Attempt(), LocalFactories(given.model))


def _attempt(
    config: Config, given: CallerObjects, view: ViewLike, attempt: Attempt, factories: Factories
) -> Run:
    """One attempt at it."""
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
