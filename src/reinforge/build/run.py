"""One config, run to its end: what the Python interface, the command line, the stages of a pipeline
and `reinforge check` all call.

Nothing heavy is imported with this module: the screen says something first.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from reinforge.config.schema import Config
from reinforge.core.aio import run_sync

if TYPE_CHECKING:
    from reinforge.build.remote import Attempt
    from reinforge.build.workshop import Given
    from reinforge.loops.session import Session, ViewLike


@dataclass(frozen=True)
class RunResult:
    run_dir: Path
    metrics: dict[str, float]  # the newest value of each
    steps: int
    stopped: str | None = None  # why it ended before its time
    report: Path | None = None


def train_config(
    config: Config, given: Given | None = None, view: ViewLike | None = None
) -> RunResult:
    """Runs one config to its end, or on from where it stopped. Every ending leaves a report."""
    from reinforge.watch.view import View

    view = view or View()
    view.doing("loading torch and transformers")
    from reinforge.build.sharded import open_ranks
    from reinforge.build.workshop import Given

    given = given or Given()
    try:
        if config.cluster.kind == "ray":
            from reinforge.build.remote import on_ray

            session = on_ray(config, given, view, _run)
        else:
            with open_ranks(config):
                session = _run(config, given, view)
    finally:
        view.stop()
    return RunResult(session.dir, session.last, session.step, session.stopped, session.report)


def _run(config: Config, given: Given, view: ViewLike, attempt: Attempt | None = None) -> Session:
    """The run that the config describes, to its end. `attempt`: who wants to know how far it is."""
    from reinforge.build.engines import close_servers
    from reinforge.build.trainer import build

    began = time.monotonic()
    trainer = build(config, view, given)
    session = trainer.session
    session.began = began
    if attempt is not None:
        attempt.made(session)

    async def go() -> None:
        with session:
            if attempt is not None:
                attempt.opened(session)
            await trainer.run()

    try:
        run_sync(go(), session.terminate)
    finally:
        close_servers(getattr(trainer, "engine", None))
    return session
