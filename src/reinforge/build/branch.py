"""A branch: a new run that goes on from a step of another, with other settings if wanted."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from reinforge.build.caller_objects import CallerObjects
from reinforge.build.replay import ReplayPlan, go, plan_replay, prepare
from reinforge.checkpoint import store
from reinforge.config.load import config_from_dict
from reinforge.config.schema import Config
from reinforge.core.errors import InputError
from reinforge.core.redact import HIDDEN, redact_settings
from reinforge.loops.config_changes import Changes, check_branch
from reinforge.watch.ending import TRACEBACK
from reinforge.watch.past import LINEAGE, configs_backwards, lineage
from reinforge.watch.runs import flatten

# of the replay, not of the branch
LEFT = ("summary.json", "report.html", TRACEBACK)


@dataclass(frozen=True)
class BranchPlan:
    """What making a branch takes. `plan_branch` makes it, `make_branch` does it."""

    new: Path
    step: int
    config: Config  # that the branch goes on with
    parent: Config
    changes: Changes
    replay: ReplayPlan | None  # None: the run has a checkpoint of the step
    run_dir: Path


def plan_branch(
    run_dir: Path, step: int, new: Path, overrides: Sequence[str] = (), *, given: bool = False
) -> BranchPlan:
    """A branch at the boundary after step `step`."""
    if new.exists() and (not new.is_dir() or any(new.iterdir())):
        raise InputError(f"{new} is not empty.", where="NEW", fix="Give a new directory.")
    plan = plan_replay(run_dir, step, given=given)
    raw = next(config for after, config in configs_backwards(run_dir) if after <= step)
    where = str(run_dir / "config.json")
    parent = config_from_dict(raw, where=where)
    config = config_from_dict(raw, where=where, overrides=[*overrides, f"run.dir={new}"])
    hidden = [key for key, value in flatten(config.model_dump(mode="json")).items() if _is(value)]
    if hidden:
        raise InputError(
            f"the run's record does not have its secrets: {', '.join(hidden)}.",
            where=hidden[0],
            fix=f"Give it again, e.g. {hidden[0]}=...",
        )
    kept = run_dir / "checkpoints" / f"step-{step:08d}"
    there = kept.is_dir() and store.intact(kept)
    return BranchPlan(
        new=new,
        step=step,
        config=config,
        parent=parent,
        changes=check_branch(parent, config),
        replay=None if there else plan,
        run_dir=run_dir,
    )


def _is(value: object) -> bool:
    return isinstance(value, str) and HIDDEN in value


def make_branch(
    plan: BranchPlan,
    given: CallerObjects | None = None,
    progress: Callable[[int], None] = lambda step: None,
) -> None:
    """Makes the directory of the branch, or nothing. Whoever trains its config goes on from the
    step.
    """
    part = plan.new.with_name(f".{plan.new.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        if plan.replay is None:
            _copy(plan, part)
        else:
            go(plan.replay, part, given, save_at={plan.step}, step=progress)
            _tidy(part)
        _describe(plan, part)
        if plan.new.exists():
            plan.new.rmdir()
        os.rename(part, plan.new)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _copy(plan: BranchPlan, part: Path) -> None:
    """From the checkpoint that the run has of the step."""
    own = plan.run_dir / "checkpoints" / f"step-{plan.step:08d}"
    prepare(plan.run_dir, own, part)
    link = part / "checkpoints" / own.name
    link.unlink()
    shutil.copytree(own, link)


def _tidy(part: Path) -> None:
    for path in (part / "checkpoints").iterdir():
        if path.is_symlink():
            path.unlink()
    for name in LEFT:
        (part / name).unlink(missing_ok=True)


def _describe(plan: BranchPlan, part: Path) -> None:
    """The branch's own configuration, and where it comes from."""
    parents = [
        *(parent for parent in lineage(plan.run_dir) if parent["step"] < plan.step),
        {
            "dir": str(plan.run_dir),
            "step": plan.step,
            "config": redact_settings(plan.parent.model_dump(mode="json")),
        },
    ]
    written = {
        "config.json": redact_settings(plan.config.model_dump(mode="json")),
        LINEAGE: {"parents": parents, "changes": plan.changes},
    }
    for name, value in written.items():
        (part / name).write_text(json.dumps(value, indent=1), encoding="utf-8")
