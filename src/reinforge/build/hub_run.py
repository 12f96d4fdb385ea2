"""A run that is also on the hub (`run.hub`): what is there when it begins."""

from __future__ import annotations

import shutil
from pathlib import Path

from reinforge.checkpoint import store
from reinforge.checkpoint.hub import PART, WHERE, HubRepository, take_over
from reinforge.checkpoint.lock import RunLock
from reinforge.config.schema import Config
from reinforge.core.errors import InputError
from reinforge.core.hub import offline
from reinforge.loops.config_changes import check_changes
from reinforge.loops.view import ViewLike


def continue_from_hub(cfg: Config, view: ViewLike) -> None:
    """Makes the repository of the run, and brings its checkpoint into the run directory where that
    has none or an older one. Before anything else of the run is made: what it was given as objects
    comes along.
    """
    hub = cfg.run.hub
    if hub is None:
        return
    if (why := offline()) is not None:
        raise InputError(f"{why}.", where=WHERE, fix="Check the network, or train without run.hub.")
    view.doing(f"asking the hub for {hub.repo}")
    repository = HubRepository(hub.repo, private=hub.private)
    repository.create()
    there = repository.steps()
    folder = Path(cfg.run.dir)
    here = store.latest(folder)
    if not there or (here is not None and store.step_of(here) >= there[-1]):
        return
    if cfg.run.resume == "never":
        raise InputError(
            f"{hub.repo} already holds a run (checkpoint step-{there[-1]:08d}).",
            where=WHERE,
            fix="Use another repository, or run.resume=auto to continue it.",
        )
    folder.mkdir(parents=True, exist_ok=True)
    with RunLock(folder):
        _bring(cfg, repository, there[-1], folder)
    view.message(f"the checkpoint of step {there[-1]} comes from {hub.repo}")


def _bring(cfg: Config, repository: HubRepository, step: int, folder: Path) -> None:
    part = folder / PART
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        repository.fetch(step, part)
        check_changes(part, cfg)  # a run of another configuration stays where it is
        take_over(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
