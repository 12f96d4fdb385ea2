"""One config becomes a run, which is gone through step by step: in this process and its ranks, or
on Ray.

The heavy half of `build/run.py`: torch and transformers come with this module.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing
from dataclasses import dataclass

from reinforge.build.attempt import Attempt
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.factories import Factories
from reinforge.build.given_model import save_given_tokenizer, with_given_model
from reinforge.build.hub_run import continue_from_hub
from reinforge.build.local import LocalFactories
from reinforge.build.ranks import open_ranks
from reinforge.build.trainer import build
from reinforge.config.schema import Config
from reinforge.core.aio import EventLoop
from reinforge.loops.open_step import RunStep
from reinforge.loops.rl import RLTrainer
from reinforge.loops.run import Run
from reinforge.loops.supervised import SupervisedTrainer
from reinforge.loops.view import ViewLike
from reinforge.rewards.load import functions_given


@dataclass(frozen=True)
class OpenRun:
    """A run that is open, and the event loop that it runs in. `execute` makes one for every attempt
    at a run; a trainer asks it for what is wanted between two steps.
    """

    run: Run
    loop: EventLoop


def execute(
    config: Config, given: CallerObjects, view: ViewLike
) -> Generator[OpenRun | RunStep, None, None]:
    """The run that the config describes: what it is when it opens, then its steps. Every step comes
    twice, open and done; what is thrown in ends the run.
    """
    continue_from_hub(config, view)
    save_given_tokenizer(config, given)
    if config.cluster.kind == "ray":
        from reinforge.build.ray_run import run_on_ray

        yield from run_on_ray(config, given, view, _attempt)
        return
    with with_given_model(config, given, view) as own, open_ranks(config):
        yield from _attempt(config, own, view, Attempt(), LocalFactories(own.model))


def _attempt(
    config: Config, given: CallerObjects, view: ViewLike, attempt: Attempt, factories: Factories
) -> Generator[OpenRun | RunStep, None, None]:
    """One attempt at it."""
    with functions_given(given.parts):
        trainer = build(config, view, given, attempt, factories)
    attempt.run_made(trainer.run)
    try:
        with EventLoop(trainer.run.terminate) as loop:
            yield from _stepped(loop, _opened(trainer, attempt), trainer.run)
    finally:
        if isinstance(trainer, RLTrainer):
            trainer.engine.close()


async def _opened(
    trainer: RLTrainer | SupervisedTrainer, attempt: Attempt
) -> AsyncGenerator[RunStep | None, None]:
    """None when the run is open, then its steps."""
    with trainer.run as run:
        attempt.run_opened(run)
        yield None
        async with aclosing(trainer.steps()) as steps:
            async for step in steps:
                yield step


def _stepped(
    loop: EventLoop, steps: AsyncGenerator[RunStep | None, None], run: Run
) -> Generator[OpenRun | RunStep, None, None]:
    """The steps for plain code: they are made while it waits for them."""

    async def following() -> RunStep | None:
        return await anext(steps, None)

    async def thrown(error: BaseException) -> None:
        await steps.athrow(error)

    loop.run(following())
    item: OpenRun | RunStep | None = OpenRun(run, loop)
    while item is not None:
        try:
            yield item
        except BaseException as error:
            loop.run(thrown(error))
            raise
        item = loop.run(following())
