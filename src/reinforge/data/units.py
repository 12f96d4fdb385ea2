"""From rows to units: the samples that a row of a data set becomes and that stay together (one
text, or the two answers of a pair).

A `Units` function is chosen by the loss: what it compares says what a row must have. Numbers of a
whole answer (a score, a label) reach the loss as streams that are constant over its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

import torch

from reinforge.core.errors import InputError
from reinforge.core.sample import Row, Sample
from reinforge.data.chat import Renderer, truncate
from reinforge.data.formats.recognise import with_column
from reinforge.data.preference import grade, number, verdict

if TYPE_CHECKING:
    from reinforge.config.data import DataConfig

Unit = list[Sample]
Units = Callable[[Renderer, Row], list[Unit]]  # mostly one unit per row


def texts(renderer: Renderer, row: Row) -> list[Unit]:
    """SFT and distillation: the row itself."""
    return [[renderer.training_row(row)]]


def pairs(renderer: Renderer, row: Row, *, scores: bool = False) -> list[Unit]:
    """The chosen answer and the rejected one, with the prompt's ids in common.

    `scores`: with the given rewards of both as `score`.
    """
    unit = [_answer(renderer, row, side) for side in ("chosen", "rejected")]
    if torch.equal(unit[0].tokens, unit[1].tokens):
        raise InputError("chosen and rejected are the same", where=row.where, fix="Remove the row.")
    if scores:
        unit = [
            constant(s, "score", number(row.columns, f"score_{side}", row.where))
            for s, side in zip(unit, ("chosen", "rejected"), strict=True)
        ]
    return [unit]


def judged(renderer: Renderer, row: Row) -> list[Unit]:
    """Answers with a `label`: {prompt, completion, label}, or a pair, which is one good answer and
    one bad one.
    """
    if row.columns.get("chosen") is not None:
        (unit,) = pairs(renderer, row)
        return [
            [constant(sample, "label", float(good))]
            for sample, good in zip(unit, (True, False), strict=True)
        ]
    good = verdict(row.columns.get("label"), row.where)
    return [[constant(_answer(renderer, row, "completion"), "label", float(good))]]


def one_sided(rows: Sequence[Row]) -> str | None:
    """What is wrong with the labels of a run on judged answers: all of them say the same.

    None where both kinds are there.
    """
    verdicts: set[bool] = set()
    for row in rows:
        verdicts |= (
            {True, False}
            if row.columns.get("chosen") is not None
            else {verdict(row.columns.get("label"), row.where)}
        )
        if len(verdicts) == 2:
            return None
    if not verdicts:
        return None
    kind = "good" if verdicts.pop() else "bad"
    return (
        f"all {len(rows)} answers are labelled {kind}: the loss compares good ones with bad ones,"
        " and pushes all of these the same way."
    )


BOTH_LABELS = "Add answers of the other kind, or train on the good ones with sft."


def compared(renderer: Renderer, row: Row, *, gap: bool = False) -> list[Unit]:
    """A reward model's pair.

    `gap`: the column `margin`, by how much the chosen answer is better, as the stream `gap`.
    """
    (unit,) = pairs(renderer, row)
    unit = [to_the_end(sample) for sample in unit]
    return [
        (
            [constant(s, "gap", number(row.columns, "margin", row.where)) for s in unit]
            if gap
            else unit
        )
    ]


def graded(renderer: Renderer, row: Row) -> list[Unit]:
    """A reward model's answer with the number it is to give: {prompt, completion, score}."""
    return [
        [
            constant(
                to_the_end(_answer(renderer, row, "completion")),
                "target",
                number(row.columns, "score", row.where),
            )
        ]
    ]


def attributed(renderer: Renderer, row: Row, *, targets: Mapping[str, str]) -> list[Unit]:
    """An attribute model's answer with the numbers that it is to give: {prompt, completion}, and a
    column for each attribute that was graded. `targets`: the stream of each attribute, which is NaN
    where the row has no number.
    """
    given = {name: grade(row.columns, name, row.where) for name in targets}
    if all(value is None for value in given.values()):
        raise InputError(
            f"has none of the attributes {', '.join(targets)}, only"
            f" {', '.join(['prompt', *row.columns])}",
            where=row.where,
            fix="Name them with data.columns: {OURS: THEIRS}, or remove the row.",
        )
    sample = to_the_end(_answer(renderer, row, "completion"))
    for name, stream in targets.items():
        value = given[name]
        sample = constant(sample, stream, math.nan if value is None else value)
    return [[sample]]


def steps(renderer: Renderer, row: Row) -> list[Unit]:
    """A process reward model's row: {prompt, steps, labels}; TRL's `completions` is another name
    for steps. Each step ends with a newline, and the token that ends it has the verdict as stream
    `label`; nothing else is trained.
    """
    where = row.where
    columns = row.columns
    parts = columns.get("steps") or columns.get("completions")
    labels = columns.get("labels")
    if (
        not isinstance(parts, list)
        or not isinstance(labels, list)
        or len(parts) != len(labels)
        or not all(isinstance(p, str) and p for p in parts)
    ):
        raise InputError(
            "needs steps, a list of texts, and labels, one for each",
            where=where,
            fix="Name them with data.columns.",
        )
    tokens = renderer.prompt(row)
    trained = [False] * len(tokens)
    stream = [0.0] * len(tokens)
    for part, label in zip(parts, labels, strict=True):
        ids = renderer.template.plain(part.rstrip("\n") + "\n")
        grade = (
            float(label)
            if isinstance(label, float) and 0 <= label <= 1
            else float(verdict(label, where))
        )
        tokens = tokens + ids
        trained = [*trained, *[False] * (len(ids) - 1), True]
        stream = [*stream, *[0.0] * (len(ids) - 1), grade]
    return [[Sample.from_tokens(row.id, tokens, trained, streams={"label": torch.tensor(stream)})]]


def _answer(renderer: Renderer, row: Row, column: str) -> Sample:
    value = row.columns.get(column)
    if value is None:
        raise InputError(
            f"has no column {column!r}, only {', '.join(['prompt', *row.columns])}",
            where=row.where,
            fix=(
                f"Name it with data.columns: {{{column}: <their name>}}. Formats that have it:"
                f" {', '.join(with_column(column))}."
            ),
        )
    rest: dict[str, Any] = {
        k: v for k, v in row.columns.items() if k not in ("chosen", "rejected", "messages", "text")
    }
    sample = renderer.training_row(replace(row, columns={**rest, "completion": value}))
    uid = row.id if column == "completion" else f"{row.id}/{column}"
    return sample.with_(uid=uid, episode=uid, group=row.id)


def to_the_end(sample: Sample) -> Sample:
    """Everything from the first trained token to the last token of the text counts as trained: a
    reward model is read at the very last token, also where a template puts something behind the end
    of the turn.
    """
    return sample.with_(trained=sample.trained.cumsum(0) > 0)


def constant(sample: Sample, name: str, value: float) -> Sample:
    """The sample with a stream that is `value` everywhere."""
    return sample.with_(streams={**sample.streams, name: torch.full((len(sample.tokens),), value)})


def fit(cfg: DataConfig, unit: Unit, limit: int) -> Unit | None:
    """The unit with samples of at most `limit` tokens, by the policy `data.length`; None where it
    is dropped, always as a whole.
    """
    longest = max(unit, key=lambda s: len(s.tokens))
    if len(longest.tokens) <= limit:
        return unit
    if cfg.length == "error":
        raise InputError(
            f"has {len(longest.tokens)} tokens, more than {limit}",
            where=f"row {longest.uid}",
            fix="Set data.length: drop or truncate, or raise data.max_length.",
        )
    if cfg.length == "drop":
        return None
    short = [s if len(s.tokens) <= limit else truncate(s, limit) for s in unit]
    whole = [s for s in short if s is not None]
    return whole if len(whole) == len(unit) else None


class UnitsOnDemand(Sequence[Unit]):
    """The units of rows that are on disk, made again whenever one is asked for. Built from what was
    found when all of them were made once: of each unit the number of its row, and which of the
    row's units it is.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        row_of: Sequence[int],
        part_of: Sequence[int],
        make: Callable[[Row], list[Unit]],
    ):
        self._rows = rows
        self._row_of = row_of
        self._part_of = part_of
        self._make = make

    def __len__(self) -> int:
        return len(self._row_of)

    @overload
    def __getitem__(self, index: int) -> Unit: ...
    @overload
    def __getitem__(self, index: slice) -> list[Unit]: ...

    def __getitem__(self, index: int | slice) -> Unit | list[Unit]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        return self._make(self._rows[self._row_of[index]])[self._part_of[index]]
