"""Goes through the trials of a sweep, one after the other. The same command goes on wherever it was
cut: what was drawn, reported and ended is in `sweep.db`, what a trial has trained in its directory.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from reinforge.checkpoint.lock import RunLock
from reinforge.core.errors import InputError, StoppedByPolicy
from reinforge.sweeps.plan import SweepPlan
from reinforge.sweeps.signals import SweepSignals
from reinforge.sweeps.study import SweepStudy, TrialRecord
from reinforge.sweeps.trial import RunTrial, run_apart
from reinforge.sweeps.trial_end import TrialEnd
from reinforge.watch.runs import read_json, read_lines, status

RECORD = "sweep.json"
SUMMARY = "summary.json"
MOST_FAILURES = 3  # in a row: something is wrong with all trials
MOST_SHOWN = 6  # differences of two sweeps


@dataclass(frozen=True)
class SweepResult:
    """What `run_sweep` returns about a sweep whose trials are done."""

    dir: Path
    trials: list[TrialRecord]
    best: TrialRecord  # the first of those that came to the best value
    summary: Path

    @property
    def ties(self) -> list[TrialRecord]:
        """Other trials that came to the value of the best."""
        return [
            record
            for record in self.trials
            if record.state == "finished"
            and record.value == self.best.value
            and record.number != self.best.number
        ]


def run_sweep(
    plan: SweepPlan, say: Callable[[str], None], *, run_trial: RunTrial = run_apart
) -> SweepResult:
    """All trials that are left. `say` hears a line before and after each."""
    with RunLock(plan.dir), SweepSignals() as signals:
        _check_record(plan)
        return _SweepLoop(plan, say, run_trial, signals).run()


class _SweepLoop:
    """The loop over trials, while the sweep's directory is ours."""

    def __init__(
        self,
        plan: SweepPlan,
        say: Callable[[str], None],
        run_trial: RunTrial,
        signals: SweepSignals,
    ):
        self.plan = plan
        self.say = say
        self.run_trial = run_trial
        self.signals = signals
        self.total = plan.sweep.how_many()
        self.study = SweepStudy(plan.dir, plan.sweep, plan.direction, plan.base.eval.every)
        self.failures = 0  # in a row, since this start

    def run(self) -> SweepResult:
        if done := _ended(self.study.all()):
            more = "the sweep goes on" if len(done) < self.total else "nothing is left to do"
            self.say(f"{len(done)} of {self.total} trials are done, {more}")
        records = self.study.all()
        while len(done := _ended(records)) < self.total:
            self.signals.check(len(done), self.total)
            self._trial(self.study.begin(), self._best(records))
            records = self.study.all()
            self._write_summary(records)
            self._clear_checkpoints(records)
            self._check_failures(records)
        return self._result(records)

    def _best(self, records: list[TrialRecord]) -> TrialRecord | None:
        """The best of those that finished."""
        finished = [record for record in records if record.state == "finished"]
        sign = 1 if self.plan.direction == "maximize" else -1
        return max(finished, key=lambda record: sign * (record.value or 0.0), default=None)

    # ---- one trial ----

    def _trial(self, record: TrialRecord, best: TrialRecord | None) -> None:
        """`best`: of the trials before it."""
        folder = self.plan.trial_dir(record.number)
        name = f"trial {record.number + 1} of {self.total}"
        _check_idle(folder)
        cut = " goes on where it was cut" if folder.exists() else ""
        self.say(f"{name}{cut}: {shown(record.values)}")
        judged = _JudgedTrial(self.plan, self.study, record.number)
        began = time.monotonic()
        try:
            config = self.plan.config_of(record.values, folder, name)
        except InputError as error:
            end = TrialEnd("failed", error=str(error))
        else:
            end = self.run_trial(config, judged, self.signals)
        seconds = time.monotonic() - began
        if judged.missing is not None:
            self._forget_first(record)
            raise judged.missing
        if end.kind == "terminated":
            self.signals.check(len(_ended(self.study.all())), self.total)
            raise StoppedByPolicy(f"{name} was stopped: {end.error} The same command continues.")
        self._tell(judged, end, seconds, best)

    def _tell(
        self, judged: _JudgedTrial, end: TrialEnd, seconds: float, best: TrialRecord | None
    ) -> None:
        """The study and whoever watches hear how a trial ended."""
        metric = self.plan.metric
        value = end.metrics.get(metric)
        state = "pruned" if judged.pruned and end.kind == "finished" else end.kind
        error = end.error
        if state == "finished" and (value is None or not math.isfinite(value)):
            state = "failed"
            error = f"{metric} is {value} at the end."
        self.failures = self.failures + 1 if state == "failed" else 0
        self.study.tell(
            judged.number, state, value, steps=end.steps, seconds=round(seconds, 1), error=error
        )
        match state:
            case "finished":
                assert value is not None
                note = " (the best so far)" if self._is_better(value, best) else ""
                line = f"{metric} {value:.4g} after {end.steps} steps, {seconds:.0f} s{note}"
            case "pruned":
                line = f"pruned at step {end.steps}, {metric} {value:.4g}, {seconds:.0f} s"
            case _:
                line = f"failed: {error}"
        self.say(f"  {line}")

    def _is_better(self, value: float, best: TrialRecord | None) -> bool:
        if best is None or best.value is None:
            return True
        return value > best.value if self.plan.direction == "maximize" else value < best.value

    def _check_failures(self, records: list[TrialRecord]) -> None:
        if self.failures >= MOST_FAILURES and len(_ended(records)) < self.total:
            raise StoppedByPolicy(
                f"{self.failures} trials in a row failed, the last with: {records[-1].error} The"
                " same command goes on with other values."
            )

    def _forget_first(self, record: TrialRecord) -> None:
        """Of a sweep whose metric does not exist nothing is left, so that the command can be given
        again with another one.
        """
        if record.number == 0 and len(self.study.all()) == 1:
            self.study.close()
            for name in (RECORD, self.study.path.name):
                (self.plan.dir / name).unlink(missing_ok=True)
            shutil.rmtree(self.plan.trial_dir(0), ignore_errors=True)

    def _clear_checkpoints(self, records: list[TrialRecord]) -> None:
        """The weights of all trials would fill a disk: those of the best stay."""
        best = self._best(records)
        if self.plan.keep == "all" or best is None:
            return
        for record in _ended(records):
            if record.number != best.number:
                folder = self.plan.trial_dir(record.number) / "checkpoints"
                shutil.rmtree(folder, ignore_errors=True)

    # ---- what comes out ----

    def _result(self, records: list[TrialRecord]) -> SweepResult:
        path = self._write_summary(records)
        best = self._best(records)
        if best is None:
            raise StoppedByPolicy(
                f"none of the {self.total} trials came to its end: there is no best one. {path} has"
                " what became of them."
            )
        return SweepResult(self.plan.dir, records, best, path)

    def _write_summary(self, records: list[TrialRecord]) -> Path:
        plan = self.plan
        best = self._best(records)
        values: dict[str, Any] = {"metric": plan.metric, "direction": plan.direction, "best": None}
        if best is not None:
            values["best"] = {**self._described(best), "command": plan.command(best.values)}
        values["trials"] = [self._described(record) for record in records]
        return _write_json(plan.dir / SUMMARY, values)

    def _described(self, record: TrialRecord) -> dict[str, Any]:
        return {**asdict(record), "dir": str(self.plan.trial_dir(record.number))}


def _ended(records: list[TrialRecord]) -> list[TrialRecord]:
    return [record for record in records if record.state != "running"]


class _JudgedTrial:
    """What a trial's evaluations are told to; it remembers what was decided."""

    def __init__(self, plan: SweepPlan, study: SweepStudy, number: int):
        self.plan = plan
        self.study = study
        self.number = number
        self.pruned = False
        self.missing: InputError | None = None  # the metric is not there

    def __call__(self, step: int, total: int, metrics: dict[str, float]) -> str | None:
        """Why the run is to end, if it is."""
        metric = self.plan.metric
        if metric not in metrics:
            self.missing = InputError(
                f"the evaluation reports no metric {metric!r}.",
                where="--metric",
                fix=f"It reports: {', '.join(sorted(metrics))}.",
            )
            return f"there is no metric {metric}"
        value = metrics[metric]
        # before the first step all trials are alike
        if step == 0 or not math.isfinite(value):
            return None
        worse = self.study.report(self.number, step, value)
        self.pruned = worse and step < total  # one that came to its end is not cut short
        return f"pruned by the sweep at {metric} {value:.4g}" if self.pruned else None


def _check_record(plan: SweepPlan) -> None:
    """A sweep that goes on is the one that was begun."""
    path = plan.dir / RECORD
    now = json.loads(json.dumps(plan.record()))
    if not path.exists():
        _write_json(path, now)
        return
    before = read_json(path)
    changed = [
        f"{key} was {before.get(key)!r} and is {now.get(key)!r}"
        for key in dict.fromkeys((*before, *now))
        if before.get(key) != now.get(key)
    ]
    if changed:
        more = f"; and {len(changed) - MOST_SHOWN} more" if len(changed) > MOST_SHOWN else ""
        raise InputError(
            f"the sweep there was begun with other settings: {'; '.join(changed[:MOST_SHOWN])}"
            f"{more}.",
            where=str(plan.dir),
            fix="Restore them, or begin another sweep with --dir.",
        )


def _check_idle(folder: Path) -> None:
    """No process that an earlier start left behind is at a trial."""
    if folder.exists() and status(folder, list(read_lines(folder / "events.jsonl"))) == "running":
        raise InputError(
            "this trial is still running: the sweep that started it was killed.",
            where=str(folder),
            fix="It ends by itself after its step; give the same command again then.",
        )


def _write_json(path: Path, values: Mapping[str, Any]) -> Path:
    """The file is the old one or the new one, never a part."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(values, indent=1), encoding="utf-8")
    os.replace(part, path)
    return path


def shown(values: Mapping[str, Any]) -> str:
    """
    >>> shown({"train.learning_rate": 0.000123456, "algorithm.group_size": 8})
    'train.learning_rate 0.0001235, algorithm.group_size 8'
    """
    texts = (f"{v:.4g}" if isinstance(v, float) else str(v) for v in values.values())
    return ", ".join(f"{key} {text}" for key, text in zip(values, texts, strict=True))
