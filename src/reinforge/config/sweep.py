"""The settings of a sweep: which keys of a configuration vary, how often, and what judges them.

    over:
      train.learning_rate: log:1e-6..1e-4
      algorithm.group_size: [4, 8, 16]
    trials: 20
    metric: eval/reward
    pruner: {kind: median, startup: 4}

A file of its own (`reinforge sweep CONFIG --space FILE`); the command line may say the same.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from reinforge.config.base import Count, Natural, Section
from reinforge.config.explain import problems_of
from reinforge.config.load import read_text
from reinforge.config.search import MOST_IN_GRID, Domain, parse_domain
from reinforge.config.strict import parse
from reinforge.core.errors import InputError

Direction = Literal["maximize", "minimize"]
USUAL_TRIALS = 20
LESS_IS_BETTER = re.compile(r"loss|perplexity|error|calibration|unscored")
MORE_IS_BETTER = re.compile(r"reward|accuracy|pass@|margin")
# what evaluations report under plain names; those of environments and losses may be others
REPORTED = (
    "eval/accuracy",
    "eval/reward",
    "eval/loss",
    "eval/margin",
    "eval/calibration",
    "eval/length",
    "eval/unscored",
)
PLAIN = re.compile(r"(eval/)?[a-z]+")
NEAR = 0.9  # of difflib: one letter that is missing, wrong or too many
# keys that a sweep must not vary, by how they begin, and why
FIXED = {
    "eval.": "trials would be evaluated in different ways, and could not be compared",
    "data.eval.": "trials would be evaluated on different rows, and could not be compared",
    "run.dir": "every trial has a directory of its own in the sweep's (--dir)",
    "run.resume": "a trial that was cut goes on by itself",
    "run.log.": "it changes nothing of what is learned",
    "run.checkpoint.": "it changes nothing of what is learned",
}


class PrunerConfig(Section):
    """When a trial that does badly is ended before its time."""

    kind: Literal["median", "asha", "none"] = Field(
        "median",
        description=(
            "median: worse than the median of the trials before at the same step. asha: not among"
            " the best 1/factor at steps that grow by factor. none: every trial to its end."
        ),
    )
    startup: Natural = Field(
        4, description="median: finished trials before the first may be pruned."
    )
    warmup: Natural = Field(0, description="median: steps of a trial before it may be pruned.")
    factor: int = Field(3, ge=2, description="asha: one in this many goes on at each rung.")


class SweepConfig(Section):
    """A sweep as a file or a command line describes it. `read_sweep` makes it."""

    over: dict[str, Any] = Field(description="Keys of the configuration, each with a range.")
    trials: Count | None = Field(
        None, description="Runs in all, pruned and failed ones too. Default: 20; grid: all values."
    )
    seed: int = Field(0, description="Of what the sampler draws.")
    metric: str | None = Field(
        None, description="What an evaluation reports. Default: eval/reward, or eval/loss."
    )
    direction: Direction | None = Field(
        None, description="Default: by the name of the metric; a loss is minimized."
    )
    sampler: Literal["tpe", "random", "grid"] = Field(
        "tpe",
        description=(
            "tpe: learns from the trials before where good values are. random. grid: every"
            " combination of values that can be counted."
        ),
    )
    pruner: PrunerConfig = PrunerConfig()

    def space(self) -> dict[str, Domain]:
        """What each key may be."""
        return {key: parse_domain(given, f"over {key}") for key, given in self.over.items()}

    def how_many(self) -> int:
        """Trials in all."""
        if self.sampler == "grid":
            size = prod(len(values) for values in grid_of(self.space()).values())
            return min(size, self.trials or size)
        return self.trials or USUAL_TRIALS


def read_sweep(path: Path | None, over: Sequence[str], settings: Mapping[str, Any]) -> SweepConfig:
    """A sweep from a file, `KEY=RANGE` texts and other settings; each counts more than those
    before it, and a setting that is None counts for nothing.
    """
    tree = _read(path) if path is not None else {}
    ranges = dict(tree.get("over", {}))
    for text in over:
        key, equals, given = text.partition("=")
        if not equals or not key.strip():
            raise InputError(
                f"{text!r} is not of the form KEY=RANGE.",
                where="--over",
                fix="Write e.g. --over train.learning_rate=log:1e-6..1e-4.",
            )
        ranges[key.strip()] = given.strip()
    pruner = settings.get("pruner")
    if pruner is not None:
        tree["pruner"] = {**tree.get("pruner", {}), "kind": pruner}
    tree |= {k: v for k, v in settings.items() if v is not None and k != "pruner"}
    found = _checked({**tree, "over": ranges}, str(path) if path is not None else "sweep")
    if not found.over:
        raise InputError(
            "nothing is to vary.",
            where="--over",
            fix="Name a key and its range, e.g. --over train.learning_rate=log:1e-6..1e-4.",
        )
    _check_keys(found)
    if found.metric is not None:
        _check_metric(found.metric)
    return found


def _read(path: Path) -> dict[str, Any]:
    data, _ = parse(read_text(path), str(path))
    if not isinstance(data, dict):
        raise InputError(
            "a search space is a mapping.",
            where=str(path),
            fix="Write e.g. `over: {train.learning_rate: log:1e-6..1e-4}`.",
        )
    known = list(SweepConfig.model_fields)
    for key in data:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            raise InputError(
                f"unknown key `{key}`.",
                where=str(path),
                fix=f"Did you mean `{near[0]}`?" if near else f"There are: {', '.join(known)}.",
            )
    if isinstance(data.get("pruner"), str):
        data["pruner"] = {"kind": data["pruner"]}
    for key in ("over", "pruner"):
        if not isinstance(data.get(key, {}), dict):
            raise InputError(
                f"`{key}` is {data[key]!r}, not a mapping.",
                where=str(path),
                fix="Write e.g. `over: {train.learning_rate: log:1e-6..1e-4}`.",
            )
    return data


def _checked(tree: Mapping[str, Any], where: str) -> SweepConfig:
    try:
        return SweepConfig.model_validate_json(json.dumps(tree), strict=True)
    except ValidationError as error:
        raise InputError("; ".join(problems_of(error)), where=where) from None


def _check_metric(metric: str) -> None:
    """A slip of the pen is told at once, not after the first evaluation."""
    if metric in REPORTED or not PLAIN.fullmatch(metric):
        return
    full = f"eval/{metric.removeprefix('eval/')}"
    if near := difflib.get_close_matches(full, REPORTED, 1, NEAR):
        raise InputError(
            f"no evaluation reports {metric!r}.", where="--metric", fix=f"Did you mean {near[0]}?"
        )


def _check_keys(sweep: SweepConfig) -> None:
    for key in sweep.over:
        reason = next((why for start, why in FIXED.items() if f"{key}.".startswith(start)), None)
        if reason is not None:
            raise InputError(
                f"a sweep cannot vary this: {reason}.",
                where=f"over {key}",
                fix="Leave it out, or set it for all trials with KEY=VALUE.",
            )
    space = sweep.space()
    if sweep.sampler == "grid":
        grid_of(space)


def grid_of(space: Mapping[str, Domain]) -> dict[str, list[Any]]:
    """All values of every key; an error where there is no end of them."""
    found: dict[str, list[Any]] = {}
    for key, domain in space.items():
        values = domain.listed()
        if values is None:
            raise InputError(
                "the values of this range cannot be counted.",
                where=f"over {key}",
                fix="For --sampler grid give choice:..., int:..., or a step: float:0..1:0.25.",
            )
        found[key] = values
    size = prod(len(values) for values in found.values())
    if size > MOST_IN_GRID:
        raise InputError(
            f"the grid has {size:,} points.",
            where="--sampler grid",
            fix=f"At most {MOST_IN_GRID:,}: give fewer values, or use --sampler tpe.",
        )
    return found


def direction_of(metric: str) -> Direction:
    """Whether more or less of a metric is better, by its name.

    >>> direction_of("eval/loss"), direction_of("eval/pass@4")
    ('minimize', 'maximize')
    """
    if LESS_IS_BETTER.search(metric):
        return "minimize"
    if MORE_IS_BETTER.search(metric):
        return "maximize"
    raise InputError(
        f"whether more or less of {metric} is better cannot be told from its name.",
        where="--direction",
        fix="Give --direction maximize or minimize.",
    )
