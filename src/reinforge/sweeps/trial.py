"""One trial of a sweep: a run in a process of its own, so that what it does to memory, to a GPU or
to itself ends with it. The sweep hears every evaluation through a pipe and may end the run.

Nothing heavy comes with this module: the sweep itself needs no torch.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Protocol

from reinforge.config.schema import Config
from reinforge.core.errors import StoppedByPolicy
from reinforge.loops.signals import PASSED_ON
from reinforge.sweeps.signals import SweepSignals
from reinforge.sweeps.trial_end import Judge, TrialEnd


class RunTrial(Protocol):
    """How a trial is run: `run_apart`, or in tests in the same process."""

    def __call__(self, config: Config, judge: Judge, signals: SweepSignals) -> TrialEnd: ...


def run_apart(config: Config, judge: Judge, signals: SweepSignals) -> TrialEnd:
    """The run in a process of its own, to its end. Signals that arrive are passed on to it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_process, args=(config, theirs), name="trial")
    process.start()
    theirs.close()
    signals.follow(process.pid)
    try:
        end = _listen(ours, judge)
        process.join()
    finally:
        signals.follow(None)
        if process.is_alive():
            process.terminate()
            process.join()
        ours.close()
    if end is not None:
        return end
    if signals.received is not None:
        return TrialEnd("terminated")
    return TrialEnd("failed", error=f"its process {_death(process.exitcode)}")


def _listen(pipe: Connection, judge: Judge) -> TrialEnd | None:
    """Answers what the run asks until it has ended; None where its process died."""
    end = None
    while True:
        try:
            message = pipe.recv()
        except (EOFError, ConnectionResetError):
            return end
        if isinstance(message, TrialEnd):
            end = message
            continue
        answer = judge(*message)
        with suppress(BrokenPipeError):
            pipe.send(answer)


def _death(code: int | None) -> str:
    """
    >>> _death(-9), _death(1)
    ('was killed by SIGKILL (out of memory, if nobody did it)', 'ended with exit code 1')
    """
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        by_kernel = " (out of memory, if nobody did it)" if name == "SIGKILL" else ""
        return f"was killed by {name}{by_kernel}"
    return f"ended with exit code {code}"


def _follow_parent() -> None:
    """Where the sweep is killed, its trial saves a checkpoint and ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def _process(config: Config, pipe: Connection) -> None:
    """What the process of a trial does. It is in a process group of its own: Ctrl-C reaches the
    sweep alone, which passes it on, once.
    """
    os.setpgid(0, 0)
    os.environ[PASSED_ON] = "1"
    threading.Thread(target=_follow_parent, daemon=True).start()

    def judge(step: int, total: int, metrics: dict[str, float]) -> str | None:
        try:
            pipe.send((step, total, metrics))
            answer: str | None = pipe.recv()
        except (EOFError, OSError):
            raise StoppedByPolicy(
                "the sweep that this trial belongs to is gone; its command continues it."
            ) from None
        return answer

    try:
        from reinforge.sweeps.trial_run import run_here

        end = run_here(config, judge)
    except KeyboardInterrupt:
        end = TrialEnd("terminated")
    with suppress(OSError):
        pipe.send(end)
