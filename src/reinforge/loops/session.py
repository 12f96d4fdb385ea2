"""Everything about a run that is not the training step: directory, lock, log, evaluation,
checkpoints, signals, resume.

Both loops (rl.py, supervised.py) are written against this. The state at a step boundary is:
backend, parts, cursor, counters. A boundary is finished once its evaluation is done; a resumed run
first finishes the boundary it was cut at.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

from reinforge.checkpoint import store
from reinforge.checkpoint.faults import crash_point
from reinforge.checkpoint.in_memory import Memory
from reinforge.checkpoint.lock import RunLock
from reinforge.checkpoint.stored import within
from reinforge.config.schema import Config
from reinforge.core.backend import Backend, Metrics, Part, State
from reinforge.core.errors import InputError, StoppedByPolicy, Terminated
from reinforge.core.redact import redact, redact_settings
from reinforge.core.sample import Group
from reinforge.data.cursor import Cursor
from reinforge.loops.changes import Changes, check_changes
from reinforge.loops.troubles import (
    absolves,
    ending_of,
    tell_faults,
    tell_troubles,
    told_of,
    what_is_bad,
    why_bad,
)
from reinforge.watch.ending import describe_end, write_summary
from reinforge.watch.logs import read_lines
from reinforge.watch.memory import device_peak, process_peak
from reinforge.watch.recorder import Recorder, note
from reinforge.watch.report import write_report
from reinforge.watch.runs import OF_ONE_STEP
from reinforge.watch.sinks import HURRIED_SECONDS, Target, make_sinks
from reinforge.watch.timing import Phases, efficiency
from reinforge.watch.troubles import Health, Trouble

T = TypeVar("T")
# a terminal that closes, a batch system whose time runs out: the end comes later
WARNINGS = (signal.SIGHUP, signal.SIGUSR1)
BAD_STEPS_IN_A_ROW = 3
DOING = {
    "reward_wait": "waiting for rewards",
    "prepare": "packing the batch",
    "annotate": "computing what the loss needs of the batch",
    "train": "updating the weights",
    "eval": "evaluating on held-out rows",
    "checkpoint": "saving a checkpoint",
}
IN_A_STEP = ("generate", "reward_wait", "prepare", "annotate", "train")
OUT_OF_TIME = "run.max_seconds:"  # how the reason begins
UNCONTAINED = "uncontained"  # the kind of event


class ViewLike(Protocol):
    def start(self, total_steps: int, title: str, first_step: int = 0) -> None: ...
    def update(self, step: int, metrics: dict[str, float]) -> None: ...
    def table(self, groups: Iterable[Group]) -> None: ...
    def message(self, text: str) -> None: ...
    def doing(self, text: str) -> None:
        """What the run is busy with now, until it says something else."""
        ...

    def troubles(self, found: Sequence[Trouble]) -> None:
        """What speaks against the run so far: all of it, every time."""
        ...

    def stop(self) -> None: ...


class NoView:
    """What is shown where nobody can see it."""

    def start(self, total_steps: int, title: str, first_step: int = 0) -> None: ...
    def update(self, step: int, metrics: dict[str, float]) -> None: ...
    def table(self, groups: Iterable[Group]) -> None: ...
    def message(self, text: str) -> None: ...
    def doing(self, text: str) -> None: ...
    def troubles(self, found: Sequence[Trouble]) -> None: ...
    def stop(self) -> None: ...


def _kinds() -> list[signal.Signals]:
    """The signals that end a run with a checkpoint.

    Whoever ignores or handles a warning (nohup ignores SIGHUP) keeps it so.
    """
    free = [kind for kind in WARNINGS if signal.getsignal(kind) is signal.SIG_DFL]
    return [signal.SIGTERM, signal.SIGINT, *free]


class Session:
    """One run of one config in one directory. Use as a context manager; `evaluate` may be None."""

    def __init__(
        self,
        cfg: Config,
        backend: Backend,
        cursor: Cursor,
        total_steps: int,
        view: ViewLike,
        evaluate: Callable[[], Awaitable[dict[str, float]]] | None = None,
        on_saved: Callable[[], None] | None = None,
        parts: Mapping[str, Part] | None = None,
        played: list[Group] | None = None,
    ):
        self.cfg = cfg
        self.backend = backend
        self.cursor = cursor
        self.total = total_steps
        self.view = view
        self.dir = Path(cfg.run.dir)
        self.evaluate = evaluate
        self.on_saved = on_saved
        self.parts = dict(parts or {})  # by name; each is saved and restored with the backend
        # where evaluation puts what it generated, for the log
        self.played = played if played is not None else []
        self.step = 0
        self.counters: dict[str, int] = {}
        self.evaluated = -1  # the last boundary whose evaluation is done
        self.best: dict[str, Any] = {}  # metric value and step of the best evaluation so far
        self.waiting = 0  # evaluations since the early-stop metric improved
        self.stopped: str | None = None  # why the run ended before its time
        self.bad_steps = 0  # in a row
        self.bad_kind = ""  # what was bad about the last of them
        self.seconds = 0.0  # of training so far
        self.last: dict[str, float] = {}  # newest metrics, for the result
        self.phases = Phases(peak=device_peak)
        # what the run was expected to take, for its record
        self.prediction: Mapping[str, Any] | None = None
        # rewards that run the model's programs without containment, now or in an earlier part of
        # the run
        self.uncontained: list[str] = []
        self.memory: Memory | None = None  # keeps boundaries beside those on disk
        # makes the state complete, before a checkpoint
        self.settle: Callable[[], Awaitable[None]] | None = None
        self.terminating: signal.Signals | None = None  # the signal that asked the run to end
        self.health = Health()
        # kinds of trouble that are in the log already; that of a tracker is an event of its own
        self._told = {"tracker"}
        self.report: Path | None = None  # where it is, once the run has ended
        # errors after which somebody begins the run again at once: no end to tell of
        self.passing: tuple[type[BaseException], ...] = ()
        self.began = time.monotonic()  # or earlier: when whoever built it began
        self._saved_at = -1
        self._handlers: dict[signal.Signals, Any] = {}  # what was there before ours
        self._task: asyncio.Future[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # the one that runs it, while it runs
        # what a resumed run's config has changed; None: nothing to compare with
        self._changed: Changes | None = {}

    # ---- begin and end ----

    def __enter__(self) -> Session:
        self.dir.mkdir(parents=True, exist_ok=True)
        self.lock = RunLock(self.dir)
        self.lock.__enter__()
        try:
            begun = (self.dir / "metrics.jsonl").exists()
            offsets = self._restore()
            log = self.cfg.run.log
            target = Target(
                self.dir,
                redact_settings(self.cfg.model_dump(mode="json")),
                log.project,
                self.step if offsets is not None else None,
                named=log.project != type(log).model_fields["project"].default,
            )
            sinks = make_sinks(self.cfg.run.log.sinks, target)
            self.recorder = Recorder(
                self.dir,
                self.cfg.model_dump(mode="json"),
                sinks,
                offsets,
                steps=self.total,
                sink_failed=self._sink_failed,
            )
            for line in read_lines(self.dir / "metrics.jsonl"):
                self.health.observe(int(line.get("step", 0)), line)
            if self.prediction is not None:
                self.recorder.document("prediction.json", self.prediction)
            self.view.start(self.total, self.dir.name, self.step)
            if offsets is not None:
                self.view.message(f"resumed at step {self.step} from {self.dir}")
            elif begun:
                self.view.message(
                    f"{self.dir} has no checkpoint: what was begun there begins again"
                )
            self._tell_changes()
            if self.uncontained:
                self.recorder.event(UNCONTAINED, rewards=self.uncontained)
            self._loop = asyncio.get_running_loop()
            if threading.current_thread() is threading.main_thread():
                self._handlers = {kind: signal.signal(kind, self._on_signal) for kind in _kinds()}
        except BaseException:
            self.lock.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self.terminating:
                self.recorder.event("signal", signal=self.terminating.name, step=self.step)
            if isinstance(error, Terminated) and self._saved_at != self.step:
                self.save()
            said = None if error is None else told_of(error)
            self.recorder.event(
                ending_of(error),
                step=self.step,
                stopped=self.stopped,
                reason=said,
                error=error and repr(error),
            )
        finally:
            self._loop = None
            for kind_of_signal, handler in self._handlers.items():
                signal.signal(kind_of_signal, handler)
            try:
                self._close_books(error)
            finally:
                self.lock.__exit__(None, None, None)
        if isinstance(error, FileNotFoundError):
            try:
                self.lock.check_place()
            except InputError as gone:
                raise gone from error

    def _close_books(self, error: BaseException | None) -> None:
        """Every ending has a summary and a report.

        What goes wrong with them is told, and takes nothing from the run itself. They are written
        before the trackers are waited for, and once more if one of those failed then.
        """
        values = redact(
            {
                "status": ending_of(error),
                "steps": self.step,
                "of": self.total,
                "stopped": self.stopped,
                "error": None if error is None else told_of(error),
                "seconds": time.monotonic() - self.began,
                # NaN is not JSON
                "metrics": {
                    name: value for name, value in self.last.items() if math.isfinite(value)
                },
                "counters": self.counters,
                **({"uncontained": self.uncontained} if self.uncontained else {}),
            }
        )
        failed = len(self.health.trackers)
        problem = self._write_ending(values)
        try:
            if self.recorder.sinks:
                self.view.doing(
                    f"handing over to {', '.join(sink.sink.name for sink in self.recorder.sinks)}"
                )
            self.recorder.finish(values)
        finally:
            self.recorder.close(HURRIED_SECONDS if isinstance(error, Terminated) else None)
            self.view.stop()
        if len(self.health.trackers) > failed:
            problem = self._write_ending(values)
        try:
            if problem is not None:
                raise problem
            if not isinstance(error, self.passing):
                self.view.message(describe_end(self.dir))
        except (InputError, OSError) as why:
            self.view.message(f"no report was written: {why}")

    def _write_ending(self, values: Mapping[str, Any]) -> Exception | None:
        """summary.json and report.html; what went wrong with them, if something did."""
        try:
            self.lock.check()
            troubles = [
                {"kind": t.kind, "what": t.what, "fix": t.fix}
                for t in self.health.troubles(ended=True)
            ]
            write_summary(self.dir, {**values, "troubles": redact(troubles)})
            self.report = write_report(self.dir)
        except (InputError, OSError) as problem:
            return problem
        return None

    def _restore(self) -> dict[str, int] | None:
        """Continues from the newest checkpoint; returns the log offsets, or None for a new run."""
        store.clean(self.dir)
        resume = self.cfg.run.resume
        there = store.steps(self.dir)
        if self.memory is not None and self.memory.step > (
            store.step_of(there[0]) if there else -1
        ):
            return self._continue(*self.memory.load(), saved=False)
        if not there:
            if resume == "must":
                raise InputError(
                    f"there is no checkpoint in {self.dir}.",
                    where="run.resume",
                    fix="Use resume: auto, or another run.dir.",
                )
            return None
        if resume == "never":
            raise InputError(
                f"{self.dir} already holds a run (checkpoint {there[0].name}).",
                where="run.dir",
                fix="Use another run.dir, or run.resume=auto to continue it.",
            )
        self._changed = check_changes(self.dir, self.cfg)
        try:
            found = store.load(there[0])
        except InputError as error:
            # it names the intact one: a damaged one is never skipped in silence
            note(self.dir, "damaged_checkpoint", checkpoint=there[0].name, error=str(error))
            raise
        return self._continue(*found)

    def _continue(
        self, state: State, extra: dict[str, Any], *, saved: bool = True
    ) -> dict[str, int]:
        self.backend.load(state)
        for name, part in self.parts.items():
            if name in extra.get("parts", {}):
                part.load(State(within(state.tensors, f"part/{name}/"), extra["parts"][name]))
        self.cursor.load(extra["cursor"])
        self.step = extra["step"]
        self.counters = extra["counters"]
        self.evaluated = extra["evaluated"]
        self.best = extra["best"]
        self.waiting = extra["waiting"]
        self.stopped = extra["stopped"]
        self.bad_steps = extra["bad_steps"]
        self.bad_kind = extra.get("bad_kind", "")
        self.uncontained = sorted({*self.uncontained, *extra.get("uncontained", [])})
        self.last = extra["clock"]["last"]
        self.seconds = extra["clock"].get("seconds", 0.0)
        if (
            self.stopped is not None
            and self.stopped.startswith(OUT_OF_TIME)
            and not self._out_of_time()
        ):
            self.stopped = None  # it has more time now
        self._saved_at = self.step if saved else -1
        offsets: dict[str, int] = extra["clock"]["offsets"]
        return offsets

    def _tell_changes(self) -> None:
        if self._changed is None:
            self.view.message(
                f"{self.dir} has no readable config.json: whether the configuration is the same"
                " could not be checked"
            )
        elif self._changed:
            self.recorder.event("config_changed", step=self.step, changes=self._changed)
            for key, (old, new) in self._changed.items():
                self.view.message(f"{key} was {old!r} and is now {new!r}")

    async def begin(self) -> None:
        """Finishes the boundary that the run starts at: the evaluation before the first step, or
        one that was cut.
        """
        if not self.going():
            self.view.message(
                "this run is finished (step"
                f" {self.step}{', ' + self.stopped if self.stopped else ''}); nothing to do"
            )
        await self._boundary()

    def going(self) -> bool:
        return self.step < self.total and self.stopped is None

    # ---- the step ----

    def phase(self, name: str) -> AbstractContextManager[None]:
        self.view.doing(
            f"step {self.step + 1}: {self._busy_with(name)}"
            if name in IN_A_STEP
            else self._busy_with(name)
        )
        return self.phases(name)

    def _busy_with(self, phase: str) -> str:
        """What a phase does, for whoever watches."""
        per_step = self.cfg.train.prompts_per_step
        answers = (
            f"generating {per_step * self.cfg.algorithm.group_size} answers to {per_step} prompts"
        )
        return {**DOING, "generate": answers}.get(phase, phase)

    async def interruptible(self, work: Awaitable[T]) -> T:
        """Awaits `work`; SIGTERM cancels it.

        Only for work that leaves the state of the step boundary as it was.
        """
        self._task = asyncio.ensure_future(work)
        if self.terminating:
            self._task.cancel()
        try:
            return await self._task
        except asyncio.CancelledError:
            if self.terminating:
                raise self._terminated() from None
            raise
        finally:
            self._task = None

    async def end_step(self, metrics: Metrics, groups: list[Group] | None = None) -> None:
        """Counts the step, logs it, and does what is due at its boundary."""
        self.step += 1
        crash_point("step:end")
        timing = self.phases.take()
        seconds = sum(v for k, v in timing.items() if k.startswith("time/"))
        tokens = metrics.get("tokens/processed", 0.0)
        metrics = {
            **metrics,
            "memory/peak_gib": process_peak(),  # unless a GPU has a number of its own
            **timing,
            "time/step": seconds,
            "tokens_per_second": tokens / seconds if seconds else 0.0,
            **efficiency(
                timing, tokens, (self.prediction or {}).get("rates"), self.cfg.rollout.staleness > 0
            ),
            "epoch": self.cursor.epoch,
            **self._stamp(),
        }
        self.last = {
            name: value for name, value in self.last.items() if not name.startswith(OF_ONE_STEP)
        } | metrics
        self.recorder.log(self.step, metrics)
        self.health.observe(self.step, metrics)
        self.view.update(self.step, self.last)
        every = self.cfg.run.log.samples_every
        if groups and every and (self.step - 1) % every == 0:
            self.recorder.samples(self.step, groups, self.cfg.run.log.samples)
            self.view.table(groups[: self.cfg.run.log.samples])
        self._judge(metrics, groups or ())
        self.seconds += seconds - timing.get("time/eval", 0.0) - timing.get("time/checkpoint", 0.0)
        if self._out_of_time() and self.going():
            self.stopped = f"{OUT_OF_TIME} {self.cfg.run.max_seconds:g} s of training are used up"
            self.recorder.event("out_of_time", step=self.step, seconds=self.seconds)
        await self._boundary()
        await asyncio.sleep(0)
        if self.terminating and self.going():
            raise self._terminated()

    def _out_of_time(self) -> bool:
        return self.cfg.run.max_seconds is not None and self.seconds >= self.cfg.run.max_seconds

    def _judge(self, metrics: Metrics, groups: Sequence[Group] = ()) -> None:
        """A step that taught nothing is counted and reported; several in a row end the run.

        Other troubles are noted.
        """
        bad = what_is_bad(metrics)
        if bad:
            self.bad_steps = self.bad_steps + 1
            self.bad_kind = bad
        elif absolves(metrics, self.bad_kind):
            self.bad_steps = 0
            self.bad_kind = ""
        if metrics.get("train/skipped"):
            self.recorder.event(
                "skipped_step", step=self.step, grad_norm=metrics.get("train/grad_norm")
            )
        tell_troubles(self.recorder, self.view.message, self.step, metrics, groups)
        self._tell_health()
        if bad and self.bad_steps >= BAD_STEPS_IN_A_ROW:
            raise StoppedByPolicy(f"{self.bad_steps} steps in a row {why_bad(bad, metrics)}")

    def _tell_health(self) -> None:
        """What speaks against the run so far: on the screen as it is now, in the log when it is
        new.
        """
        found = self.health.troubles()
        self.view.troubles(found)
        for trouble in found:
            if trouble.kind not in self._told:
                self.recorder.event(
                    "trouble",
                    step=self.step,
                    trouble=trouble.kind,
                    what=trouble.what,
                    fix=trouble.fix,
                )
        self._told = {"tracker", *(trouble.kind for trouble in found)}

    def _sink_failed(self, name: str, error: str) -> None:
        """In the thread of the tracker. The recorder has written the event."""
        self.health.hear({"kind": "sink_failed", "sink": name, "error": error})
        self.view.troubles(self.health.troubles())

    def _stamp(self) -> Metrics:
        """What every line of metrics says of a run whose results are not to be trusted
        like others.
        """
        return {"sandbox/uncontained": 1.0} if self.uncontained else {}

    # ---- boundaries ----

    def _eval_due(self) -> bool:
        every = self.cfg.eval.every
        ending = not self.going()
        return self.evaluated != self.step and (
            ending
            or (self.step == 0 and self.cfg.eval.at_start)
            or bool(every and self.step and self.step % every == 0)
        )

    async def _boundary(self) -> None:
        improved = False
        if self.evaluate is not None and self._eval_due():
            with self.phase("eval"):
                result = await self.interruptible(self.evaluate())
            self.evaluated = self.step
            # a checkpoint that a signal saved here does not hold the evaluation
            self._saved_at = -1
            result |= self._stamp()
            self.last = {**self.last, **result}
            self.recorder.log(self.step, result)
            self.health.observe(self.step, result)
            self._tell_health()
            if self.cfg.run.log.samples_every:
                self.recorder.samples(
                    self.step,
                    [g for g in self.played if g.transcripts],
                    self.cfg.run.log.samples,
                    evaluation=True,
                )
            tell_faults(self.recorder, self.step, result, self.played, "eval/")
            self.played.clear()
            self.view.update(self.step, self.last)
            improved = self._compare(result)
        every = self.cfg.run.checkpoint.every
        due = self.step > 0 and (
            not self.going()
            or bool(every and self.step % every == 0)
            or (improved and self.cfg.run.checkpoint.best is not None)
        )
        if due and self._saved_at != self.step:
            if self.settle is not None:
                await self.settle()
            self.save()
        if self.memory is not None and self.memory.due(self.step) and self._saved_at != self.step:
            if self.settle is not None:
                await self.settle()
            self.memory.keep(self.step, *self._with_parts(self._extra()))

    async def settled(self, seconds: float) -> None:
        """The run is asked to end.

        What does not settle in time cannot be saved: then it goes on from the last checkpoint.
        """
        if self.settle is None or self._saved_at == self.step:
            return
        try:
            async with asyncio.timeout(seconds):
                await self.settle()
        except TimeoutError:
            self.view.message(
                f"rollouts under way are not complete after {seconds:g} s: the last checkpoint"
                " stays the newest"
            )
            self._saved_at = self.step

    def _compare(self, result: dict[str, float]) -> bool:
        """Updates best and early stopping; True when the metric to keep the best checkpoint by has
        improved.
        """
        improved = False
        if self.cfg.run.checkpoint.best is not None:
            mode, _, metric = self.cfg.run.checkpoint.best.rpartition(":")
            improved = self._better("checkpoint", metric, mode or "max", result)
        stop = self.cfg.eval.early_stop
        if stop is not None:
            self.waiting = (
                0
                if self._better("early_stop", stop.metric, stop.mode, result)
                else self.waiting + 1
            )
            value = result[stop.metric]
            reached = stop.threshold is not None and (
                value >= stop.threshold if stop.mode == "max" else value <= stop.threshold
            )
            if reached or self.waiting >= stop.patience:
                self.stopped = (
                    f"{stop.metric} reached {value:.4g}"
                    if reached
                    else f"{stop.metric} did not improve in {stop.patience} evaluations"
                )
                self.recorder.event("early_stop", step=self.step, reason=self.stopped)
        return improved

    def _better(self, kind: str, metric: str, mode: str, result: dict[str, float]) -> bool:
        if metric not in result:
            raise InputError(
                f"the evaluation gives no metric {metric!r}.",
                where="run.checkpoint.best / eval.early_stop",
                fix=f"It gives: {', '.join(sorted(result))}.",
            )
        value = result[metric]
        held = self.best.get(kind)
        if held is not None and not (
            value > held["value"] if mode == "max" else value < held["value"]
        ):
            return False
        self.best[kind] = {"value": value, "step": self.step, "metric": metric}
        return True

    def save(self) -> Path:
        """A complete checkpoint of this boundary.

        Offsets and clocks are kept apart: they are not part of the digest.
        """
        self.lock.check()
        with self.phase("checkpoint"):
            path = store.save(self.dir, self.step, *self._with_parts(self._extra()))
            self._saved_at = self.step
            kept = {
                p
                for p in store.steps(self.dir)
                if store.step_of(p) == self.best.get("checkpoint", {}).get("step", -1)
            }
            store.prune(self.dir, self.cfg.run.checkpoint.keep, kept)
            if self.on_saved is not None:
                self.on_saved()
        self.recorder.event("checkpoint", step=self.step, path=path.name)
        return path

    def _extra(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "cursor": self.cursor.state(),
            "counters": self.counters,
            "evaluated": self.evaluated,
            "best": self.best,
            "waiting": self.waiting,
            "stopped": self.stopped,
            "bad_steps": self.bad_steps,
            "bad_kind": self.bad_kind,
            "uncontained": self.uncontained,
            "clock": {
                "offsets": self.recorder.offsets(),
                "saved": time.time(),
                "last": self.last,
                "seconds": self.seconds,
            },
        }

    def _with_parts(self, extra: dict[str, Any]) -> tuple[State, dict[str, Any]]:
        """The backend's state with the tensors of the parts beside its own, and `extra` with their
        plain values.
        """
        state = self.backend.state()
        states = {name: part.state() for name, part in self.parts.items()}
        tensors = {
            f"part/{name}/{key}": tensor
            for name, s in states.items()
            for key, tensor in s.tensors.items()
        }
        pieces = {
            f"part/{name}/{prefix}": p
            for name, s in states.items()
            for prefix, p in s.pieces.items()
        }
        plain = {**extra, "parts": {name: s.meta for name, s in states.items()}}
        return State({**state.tensors, **tensors}, state.meta, {**state.pieces, **pieces}), plain

    # ---- signals ----

    def _on_signal(self, number: int, frame: object) -> None:
        """Runs between two instructions of whatever the main thread does, so a long step cannot
        hide a signal, and a second one ends the process at once. It may be in the middle of
        anything, so what is to be done is left to the event loop.
        """
        kind = signal.Signals(number)
        if kind is signal.SIGHUP:
            self.view = NoView()  # the terminal is gone, and writing to it fails
        if self.terminating:
            if kind in WARNINGS:
                return  # more than one process may pass the same one on
            if self.terminating in WARNINGS:
                # the first was a warning, this is the request: it gets its time too
                self.terminating = kind
                return
            if number == self.terminating == signal.SIGTERM and "TORCHELASTIC_RUN_ID" in os.environ:
                # the same one: a batch system sends it to every process, and torchrun passes its
                # own on
                return
            os._exit(128 + number)
        self.terminate(kind)

    def terminate(self, kind: signal.Signals = signal.SIGINT) -> None:
        """Asks the run to save a checkpoint and end with `Terminated`, as a signal does.

        May be called from any thread, and twice.
        """
        if self.terminating:
            return
        self.terminating = kind
        loop = self._loop
        if loop is not None:
            loop.call_soon_threadsafe(self._announce, kind)

    def _announce(self, kind: signal.Signals) -> None:
        if self._task is not None:
            self._task.cancel()
        again = "" if kind in WARNINGS else " (once more to stop at once)"
        self.view.message(f"{kind.name}: saving a checkpoint, then stopping{again}")

    def _terminated(self) -> Terminated:
        assert self.terminating is not None
        error = Terminated(
            f"stopped by {self.terminating.name} at step {self.step} of {self.total}; the same"
            " command continues."
        )
        error.exit_code = 128 + self.terminating
        return error
