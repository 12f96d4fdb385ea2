"""A run: everything about it that is not the training step.

Both loops (rl.py, supervised.py) are written against `Run`. It owns the directory and its lock, the
logs, the step and the counters; at a step boundary it asks the evaluator, the checkpointer and the
signals what is due. A boundary is finished once its evaluation is done; a resumed run first
finishes the boundary it was cut at.
"""

from __future__ import annotations

import asyncio
import math
import signal
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from reinforge.checkpoint import store
from reinforge.checkpoint.crash_points import crash_point
from reinforge.checkpoint.hub import HubRepository, HubSink
from reinforge.checkpoint.lock import RunLock
from reinforge.config.schema import Config
from reinforge.core import garbage
from reinforge.core.aio import Meanwhile
from reinforge.core.errors import InputError, ReinforgeError, StoppedByPolicy, Terminated
from reinforge.core.metrics import Metrics
from reinforge.core.redact import redact, redact_settings
from reinforge.core.sample import Group
from reinforge.data.cursor import Cursor
from reinforge.loops.anchors import machine, samples_digests, update_digest, weights_digest
from reinforge.loops.checkpointer import Checkpointer
from reinforge.loops.config_changes import Changes, said_of
from reinforge.loops.control import RunControl
from reinforge.loops.evaluator import Evaluator
from reinforge.loops.finished import BY_CALLER, nothing_to_do
from reinforge.loops.given_callbacks import Callbacks
from reinforge.loops.open_step import RunStep
from reinforge.loops.signals import Signals
from reinforge.loops.step import TrainingStep
from reinforge.loops.step_profile import OPENED_BY, StepProfile
from reinforge.loops.troubles import BadSteps, ending_of, error_line, report_faults, report_troubles
from reinforge.loops.view import NoView, ViewLike
from reinforge.watch.doctor.doctor import Doctor, with_samples
from reinforge.watch.doctor.trouble import Trouble
from reinforge.watch.ending import TRACEBACK, describe_end, write_summary
from reinforge.watch.logs import flatten
from reinforge.watch.memory_usage import device_peak, process_peak
from reinforge.watch.recorder import REWARD_FILES, Recorder, sample_records
from reinforge.watch.report import write_report
from reinforge.watch.runs import OF_ONE_STEP, steps_begun
from reinforge.watch.sinks import HURRIED_SECONDS, UPLOAD_SECONDS, TrackerRun
from reinforge.watch.timing import PhaseTimer, efficiency
from reinforge.watch.trackers import make_sinks

T = TypeVar("T")
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
BY_DOCTOR = "the doctor found"
UNTIL_BUSY = 0.3  # seconds of an update after which the device has work for some time
UNCONTAINED = "uncontained"  # the kind of event


class Run:
    """One run of one config in one directory, from its lock to its report.

    build/ makes it for a trainer. Whoever starts the trainer enters it as a context manager; the
    trainer's loop calls `begin`, then `phase` and `end_step` while it is `going`.
    """

    recorder: Recorder  # from the moment that the run is entered

    def __init__(
        self,
        cfg: Config,
        cursor: Cursor,
        total_steps: int,
        view: ViewLike,
        evaluator: Evaluator,
        checkpointer: Checkpointer,
        *,
        prediction: Mapping[str, Any] | None = None,
        uncontained: Sequence[str] = (),
        reward_files: Mapping[str, str] | None = None,
        passing: tuple[type[BaseException], ...] = (),
        began: float | None = None,
        callbacks: Callbacks | None = None,
    ):
        """`prediction`: what the run is expected to take, for its record. `uncontained`: rewards
        that run the model's programs without containment. `reward_files`: the rewards that stand
        in files of the user's, and where. `passing`: errors after which somebody
        begins the run again at once, so that there is no end to tell of. `began`: when whoever
        built the run began, on the monotonic clock; now, if it is not given. `callbacks`: what a
        Python caller wants to be told.
        """
        self.cfg = cfg
        self.cursor = cursor
        self.total = total_steps
        self.view = view
        self.evaluator = evaluator
        self.checkpointer = checkpointer
        self.signals = Signals(self._tell, self._lose_terminal)
        self.dir = Path(cfg.run.dir)
        self.lock = RunLock(self.dir)
        self.prediction = prediction
        self.reward_files = reward_files
        self.uncontained = list(uncontained)  # now or in an earlier part of the run
        self.passing = passing
        self.began = time.monotonic() if began is None else began
        self.step = 0
        self.counters: dict[str, int] = {}
        self.stopped: str | None = None  # why the run ended before its time
        self.seconds = 0.0  # of training so far
        self.first_step = 0  # where this start began
        # seconds of the starts before this one, up to the checkpoint that it continues
        self.seconds_before: float | None = 0.0
        self.changes: Changes = {}  # of the configuration, in this start
        self.last: Metrics = {}  # newest metrics, for the result
        self.report: Path | None = None  # where it is, once the run has ended
        self.phases = PhaseTimer(peak=device_peak)
        self.profile = StepProfile(cfg.train.profile, self.dir)
        self.bad_steps = BadSteps()
        self.doctor = Doctor(flatten(cfg.model_dump(mode="json")), cfg.run.doctor)
        self._halted: Trouble | None = None  # what the doctor ends the run for, after its step
        # kinds of trouble that are in the log already; that of a tracker is an event of its own
        self._told = {"tracker"}
        self._doing = {**DOING, "generate": _generating(cfg)}
        self.callbacks = callbacks or Callbacks()
        self.control = RunControl(self)
        self._save_asked = False
        self._evaluation_asked = False
        self._end_told = False
        # samples of the newest step, where they are recorded only if no step follows
        # writes samples and groups of the newest step, where only a last step has them written
        self._write_step: Callable[[], None] | None = None
        self._digests: Meanwhile[dict[str, list[str]]] | None = None  # of the step that is trained

    # ---- begin ----

    def __enter__(self) -> Run:
        try:
            self.dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"{self.dir} cannot be made: {error.strerror or error}",
                where="run.dir",
                fix="Choose another directory.",
            ) from error
        self.lock.__enter__()
        try:
            self._open()
            self.signals.listen()
        except BaseException:
            self.lock.__exit__(None, None, None)
            raise
        garbage.set_aside()
        return self

    def _open(self) -> None:
        """Continues where the run was, if it was begun; opens its logs."""
        begun = steps_begun(self.dir)
        restored = self.checkpointer.restore()
        if restored is not None:
            self._continue(restored.extra)
            self.changes = restored.changes or {}
        self._open_logs(None if restored is None else restored.extra["clock"]["offsets"])
        self.view.start(max(self.total, self.step), self.dir.name, self.step)
        if restored is not None:
            self.view.message(f"resumed at step {self.step} from {self.dir}")
            self._tell_changes(restored.changes)
        elif begun is not None:
            self.view.message(
                f"{self.dir} has no checkpoint: what was begun there begins again, and the"
                f" {begun} steps that it had done are lost"
            )
        if self.uncontained:
            self.recorder.event(UNCONTAINED, rewards=self.uncontained)

    def _open_logs(self, offsets: dict[str, int] | None) -> None:
        """`offsets`: where the logs of a resumed run are cut; None for a new run."""
        (self.dir / TRACEBACK).unlink(missing_ok=True)
        log = self.cfg.run.log
        target = TrackerRun(
            self.dir,
            redact_settings(self.cfg.model_dump(mode="json")),
            log.project,
            None if offsets is None else self.step,
            named=log.project != type(log).model_fields["project"].default,
            address=log.prometheus,
        )
        self.recorder = Recorder(
            self.dir,
            self.cfg.model_dump(mode="json"),
            [*make_sinks(log.sinks, target), *self._hub_sink()],
            offsets,
            steps=self.total,
            sink_failed=self._sink_failed,
        )
        self.doctor.read(self.dir)
        # what an earlier part of the run was ended for is no reason to end this one
        self._told |= {trouble.kind for trouble in self.doctor.troubles()}
        if self.prediction is not None:
            self.recorder.document("prediction.json", self.prediction)
        if self.reward_files:
            self.recorder.document(REWARD_FILES, self.reward_files)

    def _hub_sink(self) -> list[HubSink]:
        """What pushes checkpoints to the hub, where the run is to be there too."""
        hub = self.cfg.run.hub
        if hub is None:
            return []
        return [HubSink(self.dir, HubRepository(hub.repo, private=hub.private))]

    def _tell_changes(self, changes: Changes | None) -> None:
        """What the configuration of a resumed run has changed."""
        if changes is None:
            self.view.message(
                f"{self.dir} has no readable config.json: whether the configuration is the same"
                " could not be checked"
            )
        elif changes:
            self.recorder.event("config_changed", step=self.step, changes=changes)
            for key, (old, new) in changes.items():
                self.view.message(f"{key} was {said_of(old)} and is now {said_of(new)}")
            self._tell_schedule(changes)

    def _tell_schedule(self, changes: Changes) -> None:
        """A learning rate that falls to the end of the run falls to another end now."""
        kind = self.cfg.train.schedule.kind
        longer = changes.keys() & {"train.steps", "train.epochs"}
        if longer and kind != "constant" and self.going():
            self.view.message(
                f"warning: the learning rate falls over the whole run ({kind}): from step"
                f" {self.step + 1} on it is that of a run of {self.total} steps, so it jumps. To"
                " have one curve, begin again in another directory."
            )

    async def begin(self) -> None:
        """Finishes the boundary that the run starts at: the evaluation before the first step, or
        one that was cut.
        """
        self.phases.take()  # what opening the run took, with its trackers, is no step's
        backend = self.checkpointer.backend
        self.recorder.anchor(self.step, {**self._place(), "begins": machine(backend)})
        if not self.going():
            self.view.message(nothing_to_do(self.step, self.total, self.stopped))
        self.callbacks.begin(self.control)
        await self._boundary()
        self._profile_next()

    def going(self) -> bool:
        return self.step < self.total and self.stopped is None

    async def finish(self) -> None:
        """No step follows: what is due at the end, if it was not known to be the end before."""
        await self._boundary()
        self._end_told = True
        self.callbacks.end(self.control)

    # ---- what a caller asks for ----

    def open_step(self, **facts: Any) -> RunStep:
        """The step that begins now; `facts`: of its loop, see `RunStep`."""
        return RunStep(
            self.step + 1,
            self.total,
            announce=lambda step: self.callbacks.advantages(self.control, step),
            **facts,
        )

    def stop(self, reason: str = "") -> None:
        """Ends the run after the step that is under way. The same call continues it."""
        if self.going():
            self.stopped = f"{BY_CALLER}: {reason}" if reason else BY_CALLER
            self.recorder.event("stopped_by_caller", step=self.step, reason=self.stopped)

    def ask_save(self) -> None:
        """A checkpoint at the next boundary."""
        self._save_asked = True

    def ask_evaluation(self) -> None:
        """An evaluation at the next boundary."""
        self.evaluator.check_possible()
        self._evaluation_asked = True

    async def save(self) -> Path:
        """A checkpoint of the boundary that the run is at: where it is."""
        if self.step == 0:
            raise InputError(
                "nothing is trained yet.", where="save", fix="Save after the first step."
            )
        if self.checkpointer.unsaved(self.step):
            await self.checkpointer.settle()
            self._save()
        self._tell_saved(wait=True)
        return self.checkpointer.newest()

    async def evaluate(self) -> Metrics:
        """Evaluates at the boundary that the run is at."""
        self.evaluator.check_possible()
        self._evaluation_asked = True
        await self._boundary()
        return self.evaluator.newest

    # ---- what a checkpoint holds of the run itself ----

    def _extra(self) -> dict[str, Any]:
        """Offsets and clocks are kept apart: they are not part of the digest."""
        return {
            "step": self.step,
            "cursor": self.cursor.state(),
            "counters": self.counters,
            **self.evaluator.state(),
            "stopped": self.stopped,
            "bad_steps": self.bad_steps.count,
            "bad_kind": self.bad_steps.kind,
            "uncontained": self.uncontained,
            "clock": {
                "offsets": self.recorder.offsets(),
                "saved": time.time(),
                "last": self.last,
                "seconds": self.seconds,
                "elapsed": self._elapsed(),
            },
        }

    def _elapsed(self) -> float | None:
        """Seconds of all starts, this one included; None where an older checkpoint does not say."""
        if self.seconds_before is None:
            return None
        return self.seconds_before + time.monotonic() - self.began

    def _continue(self, extra: dict[str, Any]) -> None:
        self.cursor.load(extra["cursor"])
        self.step = extra["step"]
        self.counters = extra["counters"]
        self.evaluator.load(extra)
        self.stopped = extra["stopped"]
        self.bad_steps = BadSteps(extra["bad_steps"], extra.get("bad_kind", ""))
        self.uncontained = sorted({*self.uncontained, *extra.get("uncontained", [])})
        self.last = extra["clock"]["last"]
        self.seconds = extra["clock"].get("seconds", 0.0)
        self.first_step = self.step
        self.seconds_before = extra["clock"].get("elapsed")
        was_out_of_time = self.stopped is not None and self.stopped.startswith(OUT_OF_TIME)
        if was_out_of_time and not self._out_of_time():
            self.stopped = None  # it has more time now
        if self.stopped is not None and self.stopped.startswith(BY_CALLER):
            self.stopped = None  # and this one was started again

    # ---- the step ----

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A part of a step, or of a boundary, whose time is measured."""
        what = self._doing.get(name, name)
        self.view.doing(f"step {self.step + 1}: {what}" if name in IN_A_STEP else what)
        return self.profile.named(name, self.phases(name))

    def _profile_next(self) -> None:
        if self.going():
            self.profile.begin_step(self.step + 1)

    def _tell_profile(self, written: Sequence[Path]) -> None:
        for path in written:
            self.view.message(f"profile: {path} ({OPENED_BY[path.suffix]})")

    async def interruptible(self, work: Awaitable[T]) -> T:
        """Awaits `work`; SIGTERM cancels it.

        Only for work that leaves the state of the step boundary as it was.
        """
        try:
            return await self.signals.cancellable(work)
        except asyncio.CancelledError:
            if self.signals.received:
                raise self.terminated() from None
            raise

    async def end_step(
        self,
        opened: RunStep,
        step: TrainingStep,
        groups: Sequence[Group] = (),
        trace: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        """Counts the step, logs it, and does what is due at its boundary.

        `trace` makes the record of what the step did with its groups (loops/trace.py); it is called
        where that is written.
        """
        self.step += 1
        self._tell_profile(self.profile.end_step(self.step))
        crash_point("step:end")
        timing = self.phases.take()
        seconds = sum(v for k, v in timing.items() if k.startswith("time/"))
        metrics = self._measured(step, timing, seconds)
        lasting = {k: v for k, v in self.last.items() if not k.startswith(OF_ONE_STEP)}
        self.last = lasting | metrics
        self.recorder.log(self.step, metrics)
        self.doctor.observe(self.step, metrics)
        self.view.update(self.step, self.last)
        self._show_samples(groups, trace)
        self._anchor(opened, step)
        self._judge(step, groups)
        self.seconds += seconds - timing.get("time/eval", 0.0) - timing.get("time/checkpoint", 0.0)
        if self._out_of_time() and self.going():
            self.stopped = f"{OUT_OF_TIME} {self.cfg.run.max_seconds:g} s of training are used up"
            self.recorder.event("out_of_time", step=self.step, seconds=self.seconds)
        if opened.skipped:
            self.recorder.event("step_skipped_by_caller", step=self.step)
        opened.close(metrics)
        self.callbacks.step(self.control, opened)
        await self._boundary()
        await self._obey_doctor()
        self._write_step = None  # it goes on, and the samples of the step may go
        self._profile_next()
        await asyncio.sleep(0)
        if self.signals.received and self.going():
            raise self.terminated()

    def _measured(self, step: TrainingStep, timing: Metrics, seconds: float) -> Metrics:
        """The metrics of a step with those of its time and memory."""
        tokens = step.processed
        rates = (self.prediction or {}).get("rates")
        overlapping = self.cfg.rollout.staleness > 0
        return {
            **step.metrics,
            "memory/peak_gib": process_peak(),  # unless a GPU has a number of its own
            **timing,
            "time/step": seconds,
            "tokens_per_second": tokens / seconds if seconds else 0.0,
            **efficiency(timing, tokens, rates, overlapping),
            "epoch": self.cursor.epoch,
            **self._stamp(),
        }

    def _stamp(self) -> Metrics:
        """What every line of metrics says of a run whose results are not to be trusted
        like others.
        """
        return {"sandbox/uncontained": 1.0} if self.uncontained else {}

    def records(self, step: int) -> bool:
        """Whether samples and groups of a step are recorded: every run.log.samples_every steps from
        the first one on, and the last.
        """
        every = self.cfg.run.log.samples_every
        return every > 0 and ((step - 1) % every == 0 or step == self.total)

    def _show_samples(
        self, groups: Sequence[Group], trace: Callable[[], Mapping[str, Any]] | None
    ) -> None:
        log = self.cfg.run.log
        self._write_step = partial(self._write_samples, self.step, groups, trace)
        if self.records(self.step):
            self._record_last()
            if groups:
                self.view.table(groups[: log.samples])

    def _record_last(self) -> None:
        """Samples and groups of the newest step; also those of one that is the last, which nobody
        knew before.
        """
        write, self._write_step = self._write_step, None
        if write is not None and self.cfg.run.log.samples_every:
            write()

    def _write_samples(
        self,
        step: int,
        groups: Sequence[Group],
        trace: Callable[[], Mapping[str, Any]] | None,
    ) -> None:
        told = None if trace is None else trace()
        if told:
            self.recorder.groups(step, told)
        training = told["samples"] if told else None
        limit = self.cfg.run.log.samples
        self.recorder.write_samples(sample_records(step, groups, limit, training=training))

    def begin_digests(self, opened: RunStep) -> None:
        """From now on nothing changes what a step trains on. Its samples are told apart by their
        digests, which are made while the device works.
        """
        work = partial(samples_digests, opened.samples)
        self._digests = Meanwhile(work, "digests", after=UNTIL_BUSY)

    def _anchor(self, opened: RunStep, step: TrainingStep) -> None:
        """What the step can be found and compared by."""
        digests, self._digests = self._digests, None
        self.recorder.anchor(
            self.step,
            {
                **self._place(),
                "samples": (
                    samples_digests(opened.samples) if digests is None else digests.result()
                ),
                "update": update_digest([*step.policy, *step.critic]),
                "weights": weights_digest(self.checkpointer.backend),
                "by_caller": sorted({*opened.changed, *(["skipped"] if opened.skipped else [])}),
            },
        )

    def _place(self) -> dict[str, Any]:
        """Where the run is, beside its weights."""
        return {
            "cursor": self.cursor.state(),
            "counters": self.counters,
            "budget": self.checkpointer.backend.budget,
        }

    def _out_of_time(self) -> bool:
        limit = self.cfg.run.max_seconds
        return limit is not None and self.seconds >= limit

    # ---- troubles ----

    def _judge(self, step: TrainingStep, groups: Sequence[Group]) -> None:
        """A step that taught nothing is counted and reported; several in a row end the run.

        Other troubles are noted.
        """
        self.bad_steps.observe(step)
        report_troubles(self.recorder, self._tell, self.step, step, groups)
        self._ask_doctor()
        self.bad_steps.check(step, self.cfg.train)

    def _ask_doctor(self) -> None:
        """What speaks against the run so far: on the screen as it is now, in the log when it is
        new. Some of it may end the run (run.doctor).
        """
        found = self.doctor.troubles()
        self._show_troubles(found)
        for trouble in found:
            if trouble.kind not in self._told:
                told = {name: value for name, value in trouble.record().items() if name != "kind"}
                self.recorder.event("trouble", step=self.step, trouble=trouble.kind, **told)
                if trouble.action in ("pause", "stop") and self._halted is None:
                    self._halted = trouble
        self._told = {"tracker", *(trouble.kind for trouble in found)}

    def _show_troubles(self, found: Sequence[Trouble]) -> None:
        """Causes only: what follows from them goes with them."""
        self.view.troubles([trouble for trouble in found if trouble.is_cause])

    async def _obey_doctor(self) -> None:
        """Ends the run at this boundary, if the doctor found what it is to be ended for and there
        is something left to do.
        """
        trouble = self._halted
        self._halted = None
        if trouble is None or not self.going():
            return
        why = f"{BY_DOCTOR} {trouble.kind} at step {self.step}"
        if trouble.action == "stop":
            self.stopped = why
        self._record_last()
        await self.save()
        again = "The same command goes on." if trouble.action == "pause" else "It is over."
        raise StoppedByPolicy(f"{why}: {trouble} A checkpoint is saved. {again}")

    def _sink_failed(self, name: str, error: str) -> None:
        """In the thread of the tracker. The recorder has written the event."""
        self.doctor.hear({"kind": "sink_failed", "sink": name, "error": error})
        self._show_troubles(self.doctor.newest())

    # ---- boundaries ----

    async def _boundary(self) -> None:
        improved = False
        if self._evaluation_asked or self.evaluator.due(self.step, ending=not self.going()):
            self._evaluation_asked = False
            improved = await self._evaluate()
        if not self.going():
            self._record_last()
        asked = self._save_asked or improved
        self._save_asked = False
        if self.checkpointer.due(self.step, ending=not self.going(), asked=asked):
            await self.checkpointer.settle()
            self._save()
        # a run that ends waits for the last one
        self._tell_saved(wait=not self.going())
        if self.checkpointer.snapshot_due(self.step):
            await self.checkpointer.settle()
            self.checkpointer.snapshot(self.step, self._extra())

    async def _evaluate(self) -> bool:
        """Evaluates and logs it; True if the best checkpoint is to be this one."""
        evaluator = self.evaluator
        assert evaluator.evaluate is not None
        with self.phase("eval"):
            result = await self.interruptible(evaluator.evaluate())
        # a checkpoint that a signal saved here does not hold the evaluation
        self.checkpointer.reopen()
        result |= self._stamp()
        self.last = self.last | result
        self.recorder.log(self.step, result)
        self.doctor.observe(self.step, result)
        self._ask_doctor()
        log = self.cfg.run.log
        if log.samples_every:
            shown = [group for group in evaluator.played if group.transcripts]
            self.recorder.samples(self.step, shown, log.samples, evaluation=True)
        report_faults(self.recorder, self.step, result, evaluator.played, "eval/")
        evaluator.played.clear()
        self.view.update(self.step, self.last)
        verdict = evaluator.judge(self.step, result)
        if verdict.stop is not None:
            self.stopped = verdict.stop
            self.recorder.event("early_stop", step=self.step, reason=self.stopped)
        self.callbacks.evaluation(self.control, result)
        return verdict.improved

    def _save(self) -> None:
        """A complete checkpoint of this boundary, once the one before is on disk."""
        self.lock.check()
        with self.phase("checkpoint"):
            self._tell_saved(wait=True)
            self.checkpointer.save(self.step, self._extra(), self.evaluator.best_step())

    def _tell_saved(self, *, wait: bool) -> None:
        """Tells of a checkpoint that is on disk; one that could not be written ends the run."""
        path = self.checkpointer.written(wait=wait)
        if path is None:
            return
        self.recorder.event("checkpoint", step=store.step_of(path), path=path.name)
        self.recorder.keep_checkpoint(path, self._keepers(self._artifacts == "checkpoints"))
        self.callbacks.save(self.control, path)

    # ---- signals ----

    @property
    def terminating(self) -> signal.Signals | None:
        """The signal that asked the run to end."""
        return self.signals.received

    def terminate(self, kind: signal.Signals = signal.SIGINT) -> None:
        """Asks the run to save a checkpoint and end with `Terminated`, as a signal does.

        May be called from any thread, and twice.
        """
        self.signals.terminate(kind)

    def terminated(self) -> Terminated:
        """The error that the run ends with, once it was asked to."""
        return self.signals.terminated(self.step, self.total)

    async def settle(self, seconds: float) -> None:
        """The run is asked to end: its state is to be complete, if that does not take too long."""
        if not await self.checkpointer.settle_within(self.step, seconds):
            self.leave_step(seconds)

    def leave_step(self, seconds: float) -> None:
        """The run ends, and the state is not that of a boundary: it is not saved."""
        self.checkpointer.leave(self.step)
        left = (
            "the last checkpoint stays the newest" if store.steps(self.dir) else "nothing is saved"
        )
        self.view.message(f"rollouts under way are not complete after {seconds:g} s: {left}")

    def _tell(self, text: str) -> None:
        self.view.message(text)

    def _lose_terminal(self) -> None:
        self.view = NoView()  # writing to the one that is gone fails

    # ---- end ----

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._tell_profile(self.profile.write(self.step))
            if error is not None and not isinstance(error, Terminated):
                self._record_last()  # where the end of a step has ended the run
            if self.terminating:
                self.recorder.event("signal", signal=self.terminating.name, step=self.step)
            if isinstance(error, Terminated) and self.checkpointer.unsaved(self.step):
                self._save()
            self._end_saving(error)
            if isinstance(error, Terminated) and not store.steps(self.dir):
                self.signals.nothing_saved(error, self.step, self.total)
            self._tell_end(error)
            self.recorder.event(
                ending_of(error),
                step=self.step,
                stopped=self.stopped,
                reason=None if error is None else error_line(error),
                error=error and repr(error),
            )
        finally:
            garbage.look_again()
            self.signals.close()
            try:
                self._close_books(error)
            finally:
                self.lock.__exit__(None, None, None)
        if isinstance(error, FileNotFoundError):
            try:
                self.lock.check_place()
            except InputError as gone:
                raise gone from error

    def _end_saving(self, error: BaseException | None) -> None:
        """Waits for a checkpoint that is under way. That it failed takes nothing from an error that
        the run ends with already.
        """
        try:
            self._tell_saved(wait=True)
        except ReinforgeError as problem:
            if error is None or isinstance(error, Terminated):
                raise
            self.view.message(str(problem))

    def _tell_end(self, error: BaseException | None) -> None:
        """Callbacks hear of every ending; what they raise takes nothing from the error."""
        self.control.error = error
        if error is not None and not self._end_told and not isinstance(error, self.passing):
            try:
                self.callbacks.end(self.control)
            except ReinforgeError as problem:
                self.view.message(str(problem))

    def _close_books(self, error: BaseException | None) -> None:
        """Every ending has a summary and a report.

        What goes wrong with them is told, and takes nothing from the run itself. They are written
        before the trackers are waited for, and once more if one of those failed then.
        """
        values = self._summary(error)
        self._write_traceback(error)
        failed = len(self.doctor.history.trackers)
        problem = self._write_ending(values)
        try:
            if self.recorder.sinks:
                names = ", ".join(sink.sink.name for sink in self.recorder.sinks)
                self.view.doing(f"handing over to {names}")
            self.recorder.finish(values, self._keepers(self._artifacts != "none"))
        finally:
            self.recorder.close(self._patience(error))
            self.view.stop()
        if len(self.doctor.history.trackers) > failed:
            problem = self._write_ending(values)
        if problem is None and isinstance(error, self.passing):
            return
        # the run is over: what becomes of it does not depend on whether this can be shown
        with suppress(OSError):
            self.view.message(self._describe_end(problem))

    def _patience(self, error: BaseException | None) -> float | None:
        """Seconds that the trackers have to take what is queued; None: as many as usual."""
        if isinstance(error, Terminated):
            return HURRIED_SECONDS
        uploads = self._artifacts == "checkpoints" or self.cfg.run.hub is not None
        return UPLOAD_SECONDS if uploads else None

    @property
    def _artifacts(self) -> str:
        return self.cfg.run.log.artifacts

    def _keepers(self, trackers: bool) -> set[str]:
        """Which sinks keep files of the run: the hub always, and `trackers` if they are to."""
        names = {sink.sink.name for sink in self.recorder.sinks}
        return names if trackers else names & {HubSink.name}

    def _describe_end(self, problem: Exception | None) -> str:
        """`problem`: what kept the report from being written."""
        if problem is None:
            try:
                return describe_end(self.dir)
            except (InputError, OSError) as why:
                problem = why
        return f"no report was written: {problem}"

    def _summary(self, error: BaseException | None) -> dict[str, Any]:
        finite = {k: v for k, v in self.last.items() if math.isfinite(v)}  # NaN is not JSON
        values: dict[str, Any] = {
            "status": ending_of(error),
            "steps": self.step,
            "of": self.total,
            "stopped": self.stopped,
            "error": None if error is None else error_line(error),
            "seconds": time.monotonic() - self.began,
            "seconds_all_starts": self._elapsed(),
            "steps_this_start": self.step - self.first_step,
            "metrics": finite,
            "counters": self.counters,
        }
        if self.uncontained:
            values["uncontained"] = self.uncontained
        return redact(values)

    def _write_traceback(self, error: BaseException | None) -> None:
        """All of what a run failed with: what is shown of it may be less."""
        if error is not None and ending_of(error) == "failed":
            text = "".join(traceback.format_exception(error))
            with suppress(OSError):
                (self.dir / TRACEBACK).write_text(redact(text), encoding="utf-8")

    def _write_ending(self, values: Mapping[str, Any]) -> Exception | None:
        """summary.json and report.html; what went wrong with them, if something did."""
        try:
            self.lock.check()
            found = with_samples(self.doctor.troubles(ended=True), self.dir)
            troubles = [trouble.record() for trouble in found]
            write_summary(self.dir, {**values, "troubles": redact(troubles)})
            self.report = write_report(self.dir)
        except (InputError, OSError) as problem:
            return problem
        return None


def _generating(cfg: Config) -> str:
    """What the phase `generate` does, for whoever watches."""
    prompts = cfg.train.prompts_per_step
    return f"generating {prompts * cfg.algorithm.group_size} answers to {prompts} prompts"
