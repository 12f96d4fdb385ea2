"""Does steps of a run again, without touching the run.

A replay is a resume in another directory: it links the nearest checkpoint there, copies the logs
and the journal, and goes on as the run did. So it has no code of its own for a step, and what makes
a killed run come out bit-identical makes a replay come out so. What it did is compared with the
anchors of the run.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from reinforge.build.caller_objects import CallerObjects
from reinforge.build.execute import OpenRun, execute
from reinforge.checkpoint import store
from reinforge.config.doctor import DoctorConfig
from reinforge.config.load import config_from_dict
from reinforge.config.schema import Config
from reinforge.core.errors import InputError, StoppedByPolicy
from reinforge.core.redact import redact_settings
from reinforge.data.sources import PYTHON
from reinforge.loops.anchors import code_digest
from reinforge.loops.config_changes import allowed, changes
from reinforge.loops.open_step import RunStep
from reinforge.loops.view import NoView, ViewLike
from reinforge.rollout.journal import past_of
from reinforge.watch.logs import read_json
from reinforge.watch.past import (
    Anchor,
    Difference,
    beginnings,
    configs_backwards,
    difference,
    machine_at,
    read_anchors,
    seconds_of_steps,
)
from reinforge.watch.recorder import LOGS, versions
from reinforge.watch.runs import show_run

JOURNAL = "journal.jsonl"
DECIDING = ("reinforge", "torch", "transformers", "tokenizers", "peft", "numpy", "datasets")


@dataclass(frozen=True)
class ReplayStretch:
    """Steps that were done with one configuration, up to `until`. A plan has them in order."""

    until: int
    config: Config


@dataclass(frozen=True)
class ReplayPlan:
    """How a step of a run is to be done again. `plan_replay` makes it, `replay` does it."""

    run_dir: Path
    step: int
    checkpoint: Path | None  # the nearest weights before the step; None: the model itself
    stretches: list[ReplayStretch]
    anchors: dict[int, Anchor]  # what the run recorded, by step
    begins: Anchor  # where it was begun
    threads: int | None  # of torch; None: not recorded
    seconds: float | None  # that the same steps took then
    notes: list[str]  # why it may come out differently

    @property
    def begin(self) -> int:
        """Steps that need not be done again."""
        return 0 if self.checkpoint is None else store.step_of(self.checkpoint)

    @property
    def steps(self) -> int:
        return self.step - self.begin


@dataclass(frozen=True)
class ReplayResult:
    """What a replay found. `replay` returns it."""

    step: int
    steps: int  # that were done again
    compared: int  # of those, with what the run recorded
    anchor: Anchor  # of the step, now
    recorded: Anchor | None  # ... and as the run recorded it
    parted: tuple[int, Difference] | None  # the first step that came out differently, and how
    # all tensors of the checkpoint of this step, where the run kept one: then and now
    state: tuple[str, str] | None = None
    asked_again: int = 0  # what was not in the journal, and came from outside once more

    @property
    def equal(self) -> bool | None:
        """Whether the step is the same in every bit that is compared; None: nothing to compare."""
        if self.parted is not None:
            return False
        if self.state is not None and self.state[0] != self.state[1]:
            return False
        return True if self.recorded is not None or self.state is not None else None


# ---- before ----


def plan_replay(run_dir: Path, step: int, *, given: bool = False, lead: int = 0) -> ReplayPlan:
    """What doing step `step` again takes. `given`: rows and functions come from Python. `lead`:
    steps before it that are done again too.
    """
    done = int(show_run(run_dir)["step"])
    if not 1 <= step <= done:
        raise InputError(
            f"there is no step {step}: the run has done {done}.",
            where="--step",
            fix=f"Give a step from 1 to {done}." if done else "Train it first.",
        )
    anchors = read_anchors(run_dir)
    latest = step - lead
    before = [p for p in store.steps(run_dir) if store.step_of(p) < latest and store.intact(p)]
    checkpoint = before[0] if before else None
    begin = 0 if checkpoint is None else store.step_of(checkpoint)
    started = beginnings(run_dir)
    stretches = _stretches(run_dir, begin, step)
    _check_possible(run_dir, stretches, anchors, begin, step, given)
    return ReplayPlan(
        run_dir=run_dir,
        step=step,
        checkpoint=checkpoint,
        stretches=stretches,
        anchors=anchors,
        begins=started[0] if started and started[0]["step"] == 0 else {},
        threads=machine_at(run_dir, step).get("threads"),
        seconds=seconds_of_steps(run_dir, begin, step),
        notes=_notes(run_dir, stretches, anchors, step),
    )


def _stretches(run_dir: Path, begin: int, step: int) -> list[ReplayStretch]:
    found = []
    until = step
    for after, raw in configs_backwards(run_dir):
        if after < until:
            config = config_from_dict(raw, where=str(run_dir / "config.json"))
            found.append(ReplayStretch(until, config))
            until = after
        if after <= begin:
            break
    return found[::-1]


def _check_possible(
    run_dir: Path,
    stretches: Sequence[ReplayStretch],
    anchors: dict[int, Anchor],
    begin: int,
    step: int,
    given: bool,
) -> None:
    config = stretches[-1].config
    if config.data.source == PYTHON and not given:
        raise InputError(
            "the rows of this run came from Python: its directory does not have them.",
            where=str(run_dir),
            fix="Put the rows into a file and name it in data.source.",
        )
    for number in range(begin + 1, step + 1):
        if what := anchors.get(number, {}).get("by_caller"):
            raise InputError(
                f"a Python program changed step {number} ({', '.join(what)}), and it is not here"
                " to do so again.",
                where=str(run_dir),
                fix=f"Replay a step before {number}, or one after the next checkpoint.",
            )


def _notes(
    run_dir: Path, stretches: Sequence[ReplayStretch], anchors: dict[int, Anchor], step: int
) -> list[str]:
    found = []
    if step not in anchors:
        found.append(
            "this run has no anchors (it was made by an older version): only a checkpoint of the"
            " step can be compared."
        )
    then, now = read_json(run_dir / "versions.json"), versions()
    changed = [
        f"{name} {then[name]} (now {now.get(name, 'not installed')})"
        for name in DECIDING
        if name in then and then[name] != now.get(name)
    ]
    if changed:
        found.append(f"made with {', '.join(changed)}: bits may differ.")
    machine = machine_at(run_dir, step)
    if machine and machine["code"] != code_digest():
        found.append("made with other source of reinforge: bits may differ.")
    here = torch.backends.cpu.get_cpu_capability()
    if machine and machine["cpu"] != here:
        found.append(f"made on a CPU with {machine['cpu']}, this one has {here}: bits may differ.")
    config = stretches[-1].config
    if machine.get("device", "cpu") != "cpu":
        found.append(
            f"made on {machine['device']}, where the backward pass adds in no fixed order: the"
            " rows, seeds and first samples are the same, the last bits are not."
        )
    if config.rollout.engine != "native":
        found.append(f"{config.rollout.engine} does not sample the same bits twice.")
    if config.cluster.kind != "local":
        found.append("the run was on a cluster, and is asked of it again.")
    return found


# ---- do it ----


class _ReplayEnd(StoppedByPolicy):
    """Ends a run at the step that was asked for, with nothing of what is due at an end."""


def replay(
    plan: ReplayPlan,
    given: CallerObjects | None = None,
    view: ViewLike | None = None,
    progress: Callable[[int], None] = lambda step: None,
) -> ReplayResult:
    """Does the step again and compares. The directory of the run is only read."""
    with scratch_directory() as folder:
        kept = plan.run_dir / "checkpoints" / f"step-{plan.step:08d}"
        compares = kept.is_dir() and store.intact(kept)
        go(plan, folder, given, view, save_at={plan.step} if compares else set(), step=progress)
        state = None
        if compares:
            state = (store.tensors_digest(kept), store.tensors_digest(store.steps(folder)[0]))
        return _compared(plan, folder, state)


def _compared(plan: ReplayPlan, folder: Path, state: tuple[str, str] | None) -> ReplayResult:
    found = read_anchors(folder)
    parted = None
    numbers = [n for n in range(plan.begin + 1, plan.step + 1) if n in plan.anchors]
    for number in numbers:
        what = difference(plan.anchors[number], found[number])
        if what is not None:
            parted = (number, what)
            break
    before = len(_journal(plan.run_dir).splitlines())
    return ReplayResult(
        step=plan.step,
        steps=plan.steps,
        compared=len(numbers),
        anchor=found[plan.step],
        recorded=plan.anchors.get(plan.step),
        parted=parted,
        state=state,
        asked_again=len(_journal(folder).splitlines()) - before,
    )


@contextmanager
def scratch_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="reinforge-replay-") as name:
        yield Path(name) / "run"


def go(
    plan: ReplayPlan,
    folder: Path,
    given: CallerObjects | None = None,
    view: ViewLike | None = None,
    *,
    save_at: Set[int] = frozenset(),
    step: Callable[[int], None] = lambda step: None,
    seen: Callable[[OpenRun, RunStep], None] = lambda opened, step: None,
    change: Callable[[Config], Config] = lambda config: config,
) -> None:
    """Does the steps of a plan in `folder`, which becomes a run directory like the run's own at
    that step. Checkpoints are saved after the steps of `save_at` and where settings change.
    `seen`: as `go_on`. `change`: what is done differently.
    """
    prepare(plan.run_dir, plan.checkpoint, folder)
    with threads_of(plan):
        for stretch in plan.stretches:
            last = stretch is plan.stretches[-1]
            wanted = save_at if last else save_at | {stretch.until}
            config = change(as_replayed(stretch.config, folder, plan.begins))
            _forget_config(folder, config)
            go_on(
                config,
                stretch.until,
                plan.begins,
                given,
                view,
                save_at=wanted,
                step=step,
                seen=seen,
            )


@contextmanager
def threads_of(plan: ReplayPlan) -> Iterator[None]:
    """As many threads as the run had: sums are cut by them."""
    before = torch.get_num_threads()
    if plan.threads is not None:
        torch.set_num_threads(plan.threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _forget_config(folder: Path, config: Config) -> None:
    """Where a branch began with settings with which no run is continued, nobody is to judge them
    again.
    """
    record = folder / "config.json"
    found = changes(read_json(record), redact_settings(config.model_dump(mode="json")))
    if not all(allowed(key, old, new) for key, (old, new) in found.items()):
        record.unlink(missing_ok=True)


def prepare(run_dir: Path, checkpoint: Path | None, folder: Path) -> None:
    """`folder` as the directory of a run that was cut at the checkpoint, or at its start."""
    (folder / "checkpoints").mkdir(parents=True)
    if checkpoint is not None:
        # a link: nothing is copied, and no run removes what lies behind one
        link = folder / "checkpoints" / checkpoint.name
        link.symlink_to(checkpoint.resolve(), target_is_directory=True)
        for name in LOGS:
            if (run_dir / name).exists():
                shutil.copyfile(run_dir / name, folder / name)
    (folder / JOURNAL).write_bytes(_journal(run_dir))


def _journal(run_dir: Path) -> bytes:
    """What the run heard from outside, from its start."""
    journal = run_dir / JOURNAL
    parts = (past_of(journal), journal)
    lines = [line for p in parts if p.exists() for line in p.read_bytes().splitlines() if line]
    return b"".join(line + b"\n" for line in lines)


def as_replayed(config: Config, folder: Path, begins: Anchor) -> Config:
    """The configuration with another directory, and without what leaves training as it is:
    evaluations, checkpoints, trackers.
    """
    budget = config.train.tokens_per_microbatch
    run: dict[str, Any] = {
        "dir": str(folder),
        "resume": "auto",
        "hub": None,
        "max_seconds": None,
        "doctor": DoctorConfig(),  # what it paused for is past
        "log": config.run.log.model_copy(update={"sinks": []}),
        "checkpoint": config.run.checkpoint.model_copy(update={"every": 0, "best": None}),
    }
    evaluation = {"every": 0, "at_start": False, "early_stop": None}
    recorded = begins.get("budget", budget) if budget == "auto" else budget
    return config.model_copy(
        update={
            "run": config.run.model_copy(update=run),
            "eval": config.eval.model_copy(update=evaluation),
            "train": config.train.model_copy(update={"tokens_per_microbatch": recorded}),
        }
    )


def with_kept_rollouts(config: Config) -> Config:
    return config.model_copy(update={"run": config.run.model_copy(update={"keep_rollouts": True})})


def go_on(
    config: Config,
    until: int,
    begins: Anchor,
    given: CallerObjects | None = None,
    view: ViewLike | None = None,
    *,
    save_at: Set[int] = frozenset(),
    step: Callable[[int], None] = lambda step: None,
    seen: Callable[[OpenRun, RunStep], None] = lambda opened, step: None,
) -> None:
    """Goes on with the run in `config.run.dir` until a step is done, then leaves it as it is.

    `begins`: what the engine of the original had when it was started. `seen` gets every step
    twice, open and done.
    """
    items = execute(config, given or CallerObjects(), view or NoView())
    opened = next(items)
    assert isinstance(opened, OpenRun)
    if opened.run.step == 0:
        opened.run.counters.update(begins.get("counters", {}))
    for item in items:
        if isinstance(item, OpenRun):
            opened = item
            continue
        seen(opened, item)
        if not item.done:
            continue
        step(item.number)
        if item.number in save_at:
            opened.loop.run(opened.run.save())
        if item.number == until:
            break
    reason = _ReplayEnd(f"step {until} is done")
    try:
        items.throw(reason)
    except _ReplayEnd:
        pass
