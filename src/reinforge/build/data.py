"""The section `data` becomes rows, and the cursor that goes through them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from reinforge.build.caller_objects import CallerObjects
from reinforge.config.data import DataConfig
from reinforge.config.schema import Config
from reinforge.core.errors import InputError
from reinforge.core.sample import Row
from reinforge.data.cursor import Cursor
from reinforge.data.mixture import MixtureCursor
from reinforge.data.source_report import SourceReport, lines_of
from reinforge.data.sources import (
    MIXTURE,
    PYTHON,
    fingerprint,
    hold_out,
    load_rows,
    overlap,
    rows_from,
)
from reinforge.rewards.function import FunctionReward, check_columns


def load_data(
    cfg: DataConfig, given: CallerObjects, tell: Callable[[str], None]
) -> tuple[Sequence[Row], Sequence[Row]]:
    """Training and held-out rows, each from the config or from Python objects, never sharing a
    prompt. `tell` hears how they were recognised, and which were left out.
    """
    _check_given(cfg, given)
    reports: list[SourceReport] = []
    rows = _training_rows(cfg, given, reports)
    for line in lines_of(reports):
        tell(line)
    eval_reports: list[SourceReport] = []
    if given.eval_data is None:
        source = cfg if given.data is None else cfg.model_copy(update={"source": PYTHON})
        train, held_out = hold_out(source, rows, eval_reports)
    else:
        train = rows
        held_out = _given_eval_rows(cfg, given.eval_data, eval_reports)
    for line in lines_of(eval_reports):
        tell(f"held-out {line}")
    shared = overlap(train, held_out)
    if shared:
        raise InputError(
            f"{len(shared)} evaluation rows are also training rows, e.g. {shared[0][1].id}:"
            f" {str(shared[0][1].prompt)[:80]!r}.",
            where="data.eval",
            fix="Hold them out with data.eval.size, or filter with data.where and data.eval.where.",
        )
    return train, held_out


def _check_given(cfg: DataConfig, given: CallerObjects) -> None:
    for key, source, objects in (
        ("data.source", cfg.source, given.data),
        ("data.eval.source", cfg.eval.source, given.eval_data),
    ):
        if source == PYTHON and objects is None:
            raise InputError(
                "these rows were given as Python objects, which are not kept.",
                where=key,
                fix=(
                    f"Pass them to reinforge.train again, or write them to a file and set {key}"
                    " to it."
                ),
            )
        if source not in (None, PYTHON) and objects is not None and key == "data.eval.source":
            raise InputError(
                f"eval_data is given, and {key} is {source} too.",
                where=key,
                fix="Give one of them.",
            )


def _training_rows(
    cfg: DataConfig, given: CallerObjects, reports: list[SourceReport]
) -> Sequence[Row]:
    if given.data is None:
        return load_rows(cfg, reports)
    return rows_from(
        given.data,
        columns=cfg.columns,
        system=cfg.system,
        template=cfg.template,
        fixed=cfg.fixed,
        where=cfg.where,
        format=cfg.format,
        attributes=cfg.attributes,
        limit=cfg.limit,
        drop=cfg.bad_rows == "drop",
        name="data",
        reports=reports,
    )


def _given_eval_rows(cfg: DataConfig, eval_data: Any, reports: list[SourceReport]) -> Sequence[Row]:
    size = cfg.eval.size
    held_out = rows_from(
        eval_data,
        columns=cfg.columns,
        system=cfg.system,
        template=cfg.template,
        fixed={**cfg.fixed, **cfg.eval.fixed},
        where=cfg.eval.where,
        format=cfg.format,
        attributes=cfg.attributes,
        limit=size or None,
        drop=cfg.bad_rows == "drop",
        name="eval_data",
        reports=reports,
    )
    if len(held_out) < size:
        raise InputError(
            f"asks for {size} rows, but eval_data has {len(held_out)}.",
            where="data.eval.size",
            fix="Ask for fewer, or 0 for all.",
        )
    return held_out


def check_scored_columns(
    cfg: Config, rewards: Sequence[FunctionReward], train: Sequence[Row], held_out: Sequence[Row]
) -> None:
    """Raises InputError if a reward needs a column that a row which it will score does not have."""
    # without rollouts only an evaluation scores
    rows = (train, held_out) if cfg.algorithm.rl and rewards else (held_out,)
    added = ("transcript",) if cfg.env is not None or cfg.agent is not None else ()
    check_columns(rewards, *rows, added=added, some=cfg.rollout.on_reward_error == "unscored")


def few_rows(cfg: Config, rows: int) -> InputError | None:
    """What to say, not to raise, where a step takes more rows than there are."""
    per_step = cfg.train.prompts_per_step
    if not 0 < rows < per_step:
        return None
    return InputError(
        f"{per_step} rows per step, but there are only {rows}.",
        where="train.prompts_per_step",
        fix="A step repeats rows.",
    )


def total_steps(cfg: Config, rows: int) -> int:
    """The steps of a run over so many rows."""
    if cfg.train.steps is not None:
        return cfg.train.steps
    assert cfg.train.epochs is not None
    return max(1, math.ceil(cfg.train.epochs * rows / cfg.train.prompts_per_step))


def make_cursor(cfg: Config, rows: Sequence[Row]) -> Cursor:
    """What goes through the rows of a run, one of them for every prompt or unit."""
    seed = cfg.run.seed
    data = cfg.data
    mark = fingerprint(rows)
    if not data.mixture:
        return Cursor(len(rows), seed, data.shuffle, fingerprint=mark)
    places: dict[str, list[int]] = {item.name or item.source: [] for item in data.mixture}
    for i, row in enumerate(rows):
        places[row.columns[MIXTURE]].append(i)
    weights = {item.name or item.source: item.weight for item in data.mixture}
    sized = {
        name: float(len(places[name])) if weight is None else weight
        for name, weight in weights.items()
    }
    return MixtureCursor(places, sized, seed, data.shuffle, fingerprint=mark)
