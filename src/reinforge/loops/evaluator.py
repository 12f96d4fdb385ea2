"""Evaluation at the boundaries of a run: when it is due, which one was the best, when to stop."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from reinforge.config.schema import Config
from reinforge.core.errors import InputError
from reinforge.core.metrics import Metrics
from reinforge.core.sample import Group


class EvalVerdict(NamedTuple):
    """What an evaluation says about the run. The `Evaluator` returns it to the run, which may stop
    and asks the `Checkpointer` to keep the best.
    """

    improved: bool  # by the metric that the best checkpoint is kept by
    stop: str | None  # why the run is to end now


class Evaluator:
    """Decides when a run evaluates on held-out rows, and compares what comes out.

    build/ makes it, with the evaluation itself (None: nothing is held out) and the list where that
    puts what it generated; the run asks it at every boundary. What it remembers is saved with the
    run.
    """

    def __init__(
        self,
        cfg: Config,
        evaluate: Callable[[], Awaitable[Metrics]] | None = None,
        played: list[Group] | None = None,
    ):
        self.evaluate = evaluate
        self.played = played if played is not None else []
        self.every = cfg.eval.every
        self.at_start = cfg.eval.at_start
        self.early_stop = cfg.eval.early_stop
        self.keep_best = cfg.run.checkpoint.best  # a metric, or min:metric
        self.evaluated = -1  # the last boundary whose evaluation is done
        self.best: dict[str, dict[str, Any]] = {}  # value and step of the best one, by purpose
        self.waiting = 0  # evaluations since the early-stop metric improved
        self.newest: Metrics = {}  # what the last evaluation found

    def due(self, step: int, *, ending: bool) -> bool:
        if self.evaluate is None or self.evaluated == step:
            return False
        if ending:
            return True
        if step == 0:
            return self.at_start
        return bool(self.every) and step % self.every == 0

    def check_possible(self) -> None:
        """An error where there is nothing to evaluate on."""
        if self.evaluate is None:
            raise InputError(
                "there is nothing to evaluate: no held-out rows, or no reward to score them.",
                where="data.eval",
                fix="Set data.eval.size, or give eval_data; and rewards.",
            )

    def judge(self, step: int, result: Metrics) -> EvalVerdict:
        """The boundary is evaluated: compares it with the ones before."""
        self.evaluated = step
        self.newest = dict(result)
        improved = False
        if self.keep_best is not None:
            mode, _, metric = self.keep_best.rpartition(":")
            improved = self._better("checkpoint", metric, mode or "max", step, result)
        return EvalVerdict(improved, self._why_stop(step, result))

    def _why_stop(self, step: int, result: Metrics) -> str | None:
        stop = self.early_stop
        if stop is None:
            return None
        if self._better("early_stop", stop.metric, stop.mode, step, result):
            self.waiting = 0
        elif math.isnan(result[stop.metric]):
            return None  # nothing could be scored, which says nothing about the policy
        else:
            self.waiting += 1
        value = result[stop.metric]
        if stop.threshold is not None:
            reached = value >= stop.threshold if stop.mode == "max" else value <= stop.threshold
            if reached:
                return f"{stop.metric} reached {value:.4g}"
        if self.waiting >= stop.patience:
            return f"{stop.metric} did not improve in {stop.patience} evaluations"
        return None

    def _better(self, purpose: str, metric: str, mode: str, step: int, result: Metrics) -> bool:
        """Whether this is the best so far for a purpose; then it is remembered."""
        if metric not in result:
            raise InputError(
                f"the evaluation gives no metric {metric!r}.",
                where="run.checkpoint.best / eval.early_stop",
                fix=f"It gives: {', '.join(sorted(result))}.",
            )
        value = result[metric]
        if math.isnan(value):
            return False
        held = self.best.get(purpose)
        if held is not None:
            better = value > held["value"] if mode == "max" else value < held["value"]
            if not better:
                return False
        self.best[purpose] = {"value": value, "step": step, "metric": metric}
        return True

    def best_step(self) -> int | None:
        """The step whose checkpoint is kept as the best one."""
        held = self.best.get("checkpoint")
        return None if held is None else held["step"]

    def state(self) -> dict[str, Any]:
        return {"evaluated": self.evaluated, "best": self.best, "waiting": self.waiting}

    def load(self, extra: dict[str, Any]) -> None:
        self.evaluated = extra["evaluated"]
        self.best = extra["best"]
        self.waiting = extra["waiting"]
