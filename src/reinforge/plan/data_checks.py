"""The checks of phase 2 of `plan` (see checks.py): rows, prompts, labels, columns, what the model
and the machine say. Imports torch and transformers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from reinforge.build.algorithm import algorithm_of
from reinforge.build.data import check_scored_columns, few_rows
from reinforge.build.fp8_emulation import emulation_warning
from reinforge.build.frozen import reference_apart
from reinforge.build.units import units_of
from reinforge.config.schema import Config
from reinforge.core.errors import InputError, ReinforgeError
from reinforge.core.row import Row
from reinforge.data.bad_rows import BadRows
from reinforge.data.chat import UNUSUAL, Renderer
from reinforge.data.source_report import SourceReport, lines_of
from reinforge.data.sources import overlap, train_and_eval_rows
from reinforge.data.units import BOTH_LABELS, Units, judged, one_sided, texts
from reinforge.models.load import context_length, load_tokenizer
from reinforge.plan.deep import check_deep
from reinforge.plan.gold_answers import check_rewards, named, sample
from reinforge.plan.options import PlanOptions
from reinforge.plan.outside import (
    check_engine,
    check_env,
    check_heads,
    check_model,
    check_other_models,
    check_ranks,
    check_servers,
)
from reinforge.plan.prediction import Expectation, predict_plan
from reinforge.plan.preflight import PlanReport, tell_stage
from reinforge.rewards.build import build_rewards
from reinforge.rollout.rows.curriculum import difficulties

SAMPLE_ABOVE = 10_000
LISTED = 10  # rows that are too long, by their places
TOO_LONG = {"error": "refused", "drop": "dropped", "truncate": "truncated"}  # by data.length


def check_data(config: Config, report: PlanReport, options: PlanOptions, *, models: bool) -> None:
    """All of them, in this order, and phase 3 where it was asked for.

    `models`: they are here, or can be fetched.
    """
    tell_stage("putting the algorithm together")
    _check_algorithm(config, report)
    tell_stage("reading the data")
    train, held_out = _rows(config, report)
    if not train:
        return
    try:
        plan = _check_rows(config, train, held_out, report, options, models=models)
    except ReinforgeError as error:
        if not (options.deep and models):
            raise
        report.errors.append(str(error))
        plan = None
    if options.deep and models:
        check_deep(config, train, plan, report)


def _check_rows(
    config: Config,
    train: Sequence[Row],
    held_out: Sequence[Row],
    report: PlanReport,
    options: PlanOptions,
    *,
    models: bool,
) -> Expectation | None:
    """What is looked for in rows that could be read; what the run is expected to take."""
    plan = None
    tell_stage("comparing training and evaluation rows")
    check_disjoint(train, held_out, report)
    _check_curriculum(config, train)
    tell_stage("looking for the columns of the rewards")
    _check_columns(config, train, held_out)
    _check_labels(config, train, report)
    if models:
        plan = _check_model(config, train, held_out, report, options)
    else:
        report.warn("plan", "prompts, memory and time could not be checked without the models.")
    tell_stage("looking for engines and ranks")
    check_engine(config, report)
    check_ranks(config, report, gpu=options.gpu)
    check_servers(config, report)
    tell_stage("scoring gold answers")
    check_rewards(config, train, report)
    return plan


def _check_model(
    config: Config,
    train: Sequence[Row],
    held_out: Sequence[Row],
    report: PlanReport,
    options: PlanOptions,
) -> Expectation | None:
    """What the tokenizer and the model's configuration tell."""
    tell_stage("rendering prompts")
    _check_prompts(config, sample(train, SAMPLE_ABOVE), sample(held_out, SAMPLE_ABOVE), report)
    if report.ok:
        tell_stage("beginning an episode")
        check_env(config, train, report)
    tell_stage("looking for the other models")
    check_other_models(config)
    tell_stage("looking at the model's heads")
    check_heads(config, report)
    device = "cuda" if options.gpu else config.model.device
    if warning := emulation_warning(config, device):
        report.warnings.append(str(warning))
    tell_stage("predicting memory and time")
    return predict_plan(config, report, options)


def _rows(config: Config, report: PlanReport) -> tuple[Sequence[Row], Sequence[Row]]:
    reports: list[SourceReport] = []
    train, held_out = train_and_eval_rows(config.data, reports)
    told = [line.removeprefix("data: ") for line in lines_of(reports)]
    if told:
        report.summary["data"] = told
    report.summary["rows"] = {"train": len(train), "eval": len(held_out)}
    if not train:
        report.refuse(
            "data.source",
            f"{config.data.source} gives no training rows.",
            "Check data.where, data.limit and data.eval.size.",
        )
    elif (doubt := few_rows(config, len(train))) is not None:
        report.warnings.append(str(doubt))
    wants_eval = config.data.eval.source is not None or config.data.eval.size > 0
    if wants_eval and not held_out:
        report.refuse(
            "data.eval",
            "gives no evaluation rows.",
            "Check data.eval.source, data.eval.where and data.eval.size.",
        )
    if train and config.train.epochs is not None:
        report.summary["steps"] = math.ceil(
            config.train.epochs * len(train) / config.train.prompts_per_step
        )
    return train, held_out


def check_disjoint(train: Sequence[Row], held_out: Sequence[Row], report: PlanReport) -> None:
    """Refuses evaluation rows that ask what is trained on, whatever their ids: their scores would
    measure memory.
    """
    pairs = overlap(train, held_out)
    if pairs:
        twin, first = pairs[0]
        report.refuse(
            "data.eval",
            f"{len(pairs)} of {len(held_out)} evaluation rows ask the same as training rows, e.g."
            f" {named(first)} as training row {twin.id!r}.",
            "Remove the duplicates, use another source, or for generated tasks seeds further apart"
            " than the number of rows.",
        )


def _check_algorithm(config: Config, report: PlanReport) -> None:
    """Settings that no part takes, and parts that do not go together; what a user should know about
    the rest.
    """
    for note in algorithm_of(config.algorithm, config.rollout.max_new_tokens).notes:
        report.warn("algorithm", note)
    reference_apart(config)


def _check_columns(config: Config, train: Sequence[Row], held_out: Sequence[Row]) -> None:
    """Every row must have what the rewards ask for."""
    check_scored_columns(config, build_rewards(config.rewards), train, held_out)


def _check_curriculum(config: Config, train: Sequence[Row]) -> None:
    """Every row must have the number that a declared curriculum sorts by."""
    curriculum = config.sampling.curriculum
    if curriculum is not None and curriculum.column is not None:
        difficulties(train, curriculum.column)


def _check_labels(config: Config, train: Sequence[Row], report: PlanReport) -> None:
    """Judged answers need both verdicts."""
    if units_of(algorithm_of(config.algorithm, config.rollout.max_new_tokens)) is judged and (
        what := one_sided(train)
    ):
        report.warn("data", what, BOTH_LABELS)


def _check_prompts(
    config: Config, train: list[Row], held_out: list[Row], report: PlanReport
) -> None:
    tokenizer = load_tokenizer(config.model)
    context = context_length(config.model)
    check_model(config, report)
    renderer = Renderer(tokenizer, config.data)
    given = not config.algorithm.rl  # rows are trained as they are
    make = units_of(algorithm_of(config.algorithm, config.rollout.max_new_tokens))
    if config.data.blocks:
        renderer = Renderer(tokenizer, config.data.model_copy(update={"loss_on": "all"}))
    limit = config.data.max_length or context - (0 if given else config.rollout.max_new_tokens)
    if limit < 1:
        report.refuse(
            "rollout.max_new_tokens",
            f"{config.rollout.max_new_tokens} tokens leave no room for a prompt in a context of"
            f" {context}.",
        )
        return
    for rows, kind in ((train, "training"), (held_out, "evaluation")):
        # with rewards, evaluation also generates
        whole = given and (kind == "training" or not config.rewards)
        drop = config.data.bad_rows == "drop"
        rows, lengths = _lengths(renderer, rows, make if whole else None, report, drop=drop)
        if kind == "training":
            report.summary["row_tokens" if given else "prompt_tokens"] = {
                **quantiles(lengths),
                "limit": limit,
                "checked": len(rows),
            }
        if not config.data.blocks:  # which cut texts, and drop none
            check_lengths(config, kind, rows, lengths, limit, report)
    if config.algorithm.kind.wants_answers:
        _lengths(renderer, train, texts, report, drop=config.data.bad_rows == "drop")
    for name, count in renderer.counts.items():
        if count:
            report.warn(
                "data",
                f"{count} of {len(train) + len(held_out)} checked rows: {UNUSUAL.get(name, name)}.",
            )


def _lengths(
    renderer: Renderer, rows: Sequence[Row], make: Units | None, report: PlanReport, *, drop: bool
) -> tuple[list[Row], list[int]]:
    """The rows that can be rendered, and how long each is; the others are told together."""
    rendered: list[Row] = []
    found: list[int] = []
    bad = BadRows(drop=drop)
    for row in rows:
        with bad.looking_at(row.id):
            found.append(_length(renderer, row, make))
            rendered.append(row)
    bad.refuse()
    for line in bad.lines():
        report.warn("data", line)
    return rendered, found


def _length(renderer: Renderer, row: Row, make: Units | None) -> int:
    """Of the prompt, or of the longest text that the row becomes."""
    try:
        return (
            len(renderer.prompt(row))
            if make is None
            else max(len(s.tokens) for unit in make(renderer, row) for s in unit)
        )
    except ReinforgeError:
        raise
    except Exception as error:  # jinja and tokenizers raise what they like; the row must be named
        raise InputError(
            f"cannot be rendered: {type(error).__name__}: {error}.",
            where=named(row),
            fix="Check data.template, data.columns and the chat template.",
        ) from error


def quantiles(lengths: Sequence[int]) -> dict[str, int]:
    """Of a list that is not empty, each a member of it.

    >>> quantiles([5, 1, 9])
    {'min': 1, 'median': 5, 'p90': 9, 'max': 9}
    """
    ordered = sorted(lengths)
    return {
        name: ordered[round(q * (len(ordered) - 1))]
        for name, q in (("min", 0.0), ("median", 0.5), ("p90", 0.9), ("max", 1.0))
    }


def check_lengths(
    config: Config,
    kind: str,
    rows: Sequence[Row],
    lengths: Sequence[int],
    limit: int,
    report: PlanReport,
) -> None:
    """What `data.length` does to the rows past the limit."""
    long = [(n, i) for i, n in enumerate(lengths) if n > limit]
    if not long:
        return
    longest, worst = max(long, key=lambda pair: pair[0])
    what = (
        f"{len(long)} of {len(rows)} checked {kind} rows are longer than {limit} tokens; the"
        f" longest is {named(rows[worst])} with {longest}."
    )
    fix = (
        "Shorten them, raise data.max_length, lower rollout.max_new_tokens, or set data.length"
        " to drop or truncate."
    )
    if kind == "training":
        report.summary["too_long"] = {
            "count": len(long),
            "done": TOO_LONG[config.data.length],
            "rows": [{"where": rows[i].where, "tokens": n} for n, i in long[:LISTED]],
            "fix": fix,
        }
    if config.data.length == "error":
        report.refuse("data.length", what, fix)
    elif config.data.length == "drop" and len(long) == len(rows):
        report.refuse(
            "data.length",
            what,
            "All of them would be dropped: raise data.max_length or lower rollout.max_new_tokens.",
        )
    else:
        done = TOO_LONG[config.data.length]
        report.summary[done] = {**report.summary.get(done, {}), kind: len(long)}
        report.warn("data.length", what, f"They are {done}.")
