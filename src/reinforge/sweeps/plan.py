"""What a sweep is about to do, checked before anything runs: the configuration, the ranges, what
judges a trial and where everything goes. Nothing heavy comes with this module.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from reinforge.algorithms.catalogue import spec_of
from reinforge.config.load import config_from_dict, load_config
from reinforge.config.schema import Config
from reinforge.config.strict import scalar
from reinforge.config.sweep import Direction, SweepConfig, direction_of
from reinforge.core.errors import InputError
from reinforge.core.redact import redact_settings
from reinforge.plan.hub import not_here
from reinforge.plan.preflight import PlanReport, preflight
from reinforge.watch.runs import flatten

Keep = Literal["best", "all"]
PROBE = "probe"  # a directory that no trial has


@dataclass(frozen=True)
class SweepPlan:
    """A sweep that is ready to run. `plan_sweep` makes it for the command line; `run_sweep` goes
    through its trials.
    """

    source: str  # the configuration as it was named, for commands that are shown
    overrides: tuple[str, ...]
    base: Config
    sweep: SweepConfig
    metric: str
    direction: Direction
    dir: Path
    keep: Keep = "best"  # whose checkpoints stay

    def trial_dir(self, number: int) -> Path:
        """Where a trial's run is. Trials are shown and named from 1 on."""
        return self.dir / f"trial-{number + 1:03d}"

    def config_of(self, values: Mapping[str, Any], folder: Path, where: str) -> Config:
        """The configuration with the values of a trial. `where` names it for errors."""
        words = [f"{key}={json.dumps(value)}" for key, value in values.items()]
        words += [f"run.dir={json.dumps(str(folder))}", "run.resume=auto"]
        return config_from_dict(self.base.model_dump(mode="json"), where=where, overrides=words)

    def command(self, values: Mapping[str, Any]) -> str:
        """What trains with these values outside of the sweep."""
        words = [f"{key}={_as_text(value)}" for key, value in values.items()]
        return shlex.join(["reinforge", "train", self.source, *self.overrides, *words])

    def record(self) -> dict[str, Any]:
        """What must be the same when a sweep goes on."""
        settings = self.sweep.model_dump(mode="json", exclude={"trials", "metric", "direction"})
        return {
            "metric": self.metric,
            "direction": self.direction,
            **flatten(settings),
            **flatten({"config": redact_settings(self.base.model_dump(mode="json"))}),
        }


def _as_text(value: Any) -> str:
    """A value as KEY=VALUE has it: without quotes where it is text that reads as itself."""
    if isinstance(value, str) and scalar(value, where="") == value and value[:1] not in "[{\"'":
        return value
    return json.dumps(value)


def plan_sweep(
    config: Path,
    overrides: Sequence[str],
    sweep: SweepConfig,
    *,
    folder: Path | None = None,
    keep: Keep = "best",
) -> tuple[SweepPlan, list[str]]:
    """The plan, and warnings; an error that names all that is wrong."""
    base = load_config(config, overrides)
    metric = sweep.metric or usual_metric(base)
    plan = SweepPlan(
        str(config),
        tuple(overrides),
        base,
        sweep,
        metric,
        sweep.direction or direction_of(metric),
        folder or Path(f"{base.run.dir.rstrip('/')}-sweep"),
        keep,
    )
    _check_overrides(plan)
    _check_evaluation(plan)
    report = _preflight(plan)
    if report.errors:
        many = len(report.errors) > 1
        text = "\n  - ".join([f"{len(report.errors)} problems:"] * many + report.errors)
        raise InputError(text)
    return plan, [*report.warnings, *_doubts(plan)]


def usual_metric(config: Config) -> str:
    """The held-out number that an algorithm is after."""
    return "eval/reward" if spec_of(config.algorithm.name).kind.samples else "eval/loss"


def _check_overrides(plan: SweepPlan) -> None:
    for text in plan.overrides:
        key = text.partition("=")[0].strip()
        if key in plan.sweep.over:
            raise InputError(
                f"{key} is to vary, and `{text}` sets it.",
                where="--over",
                fix="Leave one of the two out.",
            )


def _check_evaluation(plan: SweepPlan) -> None:
    held_out = plan.base.data.eval
    if not held_out.size and held_out.source is None:
        raise InputError(
            "trials are compared by held-out rows, and there are none.",
            where="data.eval",
            fix="Set data.eval.size=64, or data.eval.source.",
        )


def _preflight(plan: SweepPlan) -> PlanReport:
    """What is wrong with the configuration as it is, and with single values of every range."""
    report = PlanReport()
    tries: list[tuple[str, dict[str, Any]]] = [(plan.source, {})]
    for key, domain in plan.sweep.space().items():
        tries += [(f"over {key}", {key: value}) for value in domain.ends()]
    for where, values in tries:
        config = plan.config_of(values, plan.dir / PROBE, where)
        found = preflight(config)
        if not found.errors and config.cluster.kind == "local":
            found.errors += not_here(config)
        report.errors += [text for text in found.errors if text not in report.errors]
        report.warnings += [text for text in found.warnings if text not in report.warnings]
    return report


def _doubts(plan: SweepPlan) -> list[str]:
    found = []
    if plan.sweep.pruner.kind != "none" and not plan.base.eval.every:
        found.append(
            "eval.every is 0: trials are evaluated at their end only, and none can be pruned. Give"
            " eval.every=N, or --pruner none."
        )
    changed = [key for key in plan.sweep.over if key.startswith("rewards.")]
    if changed and plan.metric == "eval/reward":
        found.append(
            f"{changed[0]} changes what eval/reward means: trials with other rewards are hard to"
            " compare. Give another --metric, e.g. eval/accuracy."
        )
    return found
