"""A run that has nothing left to do: how it says so, and whether that can be known before anything
is loaded. Reads files only, and nothing heavy comes with this module.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from reinforge.config.schema import Config
from reinforge.core.torchrun import launched
from reinforge.loops.config_changes import check_changes
from reinforge.watch.logs import read_json, read_lines
from reinforge.watch.runs import checkpoints, is_run, status, total_steps

STATE = "state.json"  # plain values of a checkpoint: checkpoint/files.py
BY_CALLER = "stopped by the caller"  # how the reason of a run begins which may go on


@dataclass(frozen=True)
class FinishedRun:
    """What is known of a run that has nothing left to do. `finished_run` reads it from the run's
    directory, and whoever was to start the run tells it instead.
    """

    dir: Path
    step: int
    total: int
    stopped: str | None  # why it ended before its time
    metrics: dict[str, float]  # the newest value of each

    @property
    def told(self) -> str:
        return nothing_to_do(self.step, self.total, self.stopped)


def nothing_to_do(step: int, total: int, stopped: str | None) -> str:
    """What a run says that has done `step` of `total` steps, and all that it is to do."""
    if step > total:
        return (
            f"this run has done {step} steps already, and {total} are asked for: nothing to do. To"
            f" go on, ask for more than {step} steps; for a run of {total} steps, use another"
            " directory."
        )
    why = f", {stopped}" if stopped else ""
    return f"this run is finished (step {step}{why}); nothing to do"


def finished_run(cfg: Config) -> FinishedRun | None:
    """The run that the config describes, where its directory says that it has ended and nothing of
    it is left; None where only the run itself can know.

    That is so where it may have to evaluate by other settings than it had, where a hub is to have
    its files, and where other ranks wait for it.
    """
    folder = Path(cfg.run.dir)
    if cfg.run.resume == "never" or cfg.run.hub is not None or launched() or not is_run(folder):
        return None
    events = list(read_lines(folder / "events.jsonl"))
    saved = checkpoints(folder)
    if status(folder, events) != "finished" or not saved:
        return None
    # as `Run` left it in its last checkpoint
    left = read_json(Path(saved[-1]["path"]) / STATE).get("extra") or {}
    step = left.get("step")
    stopped = left.get("stopped")
    if not isinstance(step, int) or (stopped or "").startswith(BY_CALLER):
        return None
    changed = check_changes(folder, cfg)
    if changed is None or changed.keys() - {"train.steps"}:
        return None
    total = cfg.train.steps or total_steps(events, {})
    if total is None or (step < total and stopped is None):
        return None
    return FinishedRun(folder, step, total, stopped, left["clock"]["last"])
