"""The run of a trial, in the process that trains: the loop of `reinforge train`, with a callback
that asks after every evaluation whether to go on. Torch comes with this module.
"""

from __future__ import annotations

import traceback
from pathlib import Path

from reinforge.build.caller_objects import CallerObjects
from reinforge.build.run import train_config
from reinforge.config.schema import Config
from reinforge.core.errors import ReinforgeError, Terminated
from reinforge.core.metrics import Metrics
from reinforge.loops.callbacks import Callback
from reinforge.loops.control import RunControl
from reinforge.loops.view import ViewLike
from reinforge.sweeps.trial_end import Judge, TrialEnd
from reinforge.watch.view import BarView


class TrialCallback(Callback):
    """Tells the sweep of every evaluation, and ends the run where the sweep says so."""

    def __init__(self, judge: Judge):
        self.judge = judge

    def on_evaluation(self, run: RunControl, metrics: Metrics) -> None:
        reason = self.judge(run.step, run.total, dict(metrics))
        if reason is not None:
            run.stop(reason)


def run_here(config: Config, judge: Judge, view: ViewLike | None = None) -> TrialEnd:
    """The run to its end, whatever that is."""
    given = CallerObjects(callbacks=[TrialCallback(judge)])
    try:
        result = train_config(config, given, view or BarView())
    except Terminated as error:
        return TrialEnd("terminated", error=str(error))
    except ReinforgeError as error:
        return TrialEnd("failed", error=str(error))
    except Exception as error:
        folder = Path(config.run.dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "traceback.txt").write_text(traceback.format_exc(), encoding="utf-8")
        return TrialEnd("failed", error=f"{type(error).__name__}: {error} (see traceback.txt)")
    return TrialEnd("finished", result.steps, dict(result.metrics))
