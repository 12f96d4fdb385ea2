"""Which format a row has, and the row with our columns beside its own."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reinforge.core.errors import InputError
from reinforge.data.formats.columns import Record, has
from reinforge.data.formats.table import FORMATS, Format

AUTO = "auto"
SHOWN = 3  # nearest formats that an error names


@dataclass(frozen=True, slots=True)
class ReadAs:
    """By which format a row was read, and from which of its columns. `read_row` makes it; whoever
    tells how data were understood counts them.
    """

    format: str
    columns: tuple[str, ...]
    templated: bool = False  # data.template made the prompt

    def __str__(self) -> str:
        """
        >>> print(ReadAs("alpaca", ("instruction", "output")))
        alpaca (instruction, output); prompt = instruction, completion = output
        """
        named = f"{self.format} ({', '.join(self.columns)})"
        return "; ".join([named, *filter(None, [", ".join(self._becomes())])])

    def _becomes(self) -> list[str]:
        made = FORMATS[self.format].becomes
        made = {**made, "prompt": "data.template"} if self.templated else made
        told = {
            ours: [part for whole in said.split(" + ") if (part := self._part(whole)) is not None]
            for ours, said in made.items()
        }
        return [
            f"{ours} = {' + '.join(parts)}"
            for ours, parts in told.items()
            if parts and parts != [ours]
        ]

    def _part(self, whole: str) -> str | None:
        """Of several columns the first that is there; words as they are."""
        known = FORMATS[self.format].names
        for part in whole.split("|"):
            column = part.split(" ")[0].split(".")[0]
            if column not in known or column in self.columns:
                return part
        return None


def read_row(
    record: Mapping[str, Any], place: str, *, format: str = AUTO, templated: bool = False
) -> tuple[dict[str, Any], ReadAs | None]:
    """The record with our columns beside its own, and how it was read; as it is, and None, where it
    has no format that is known. `templated`: its prompt is made by data.template.
    """
    name = recognised(record) if format == AUTO else format
    if name is None:
        return dict(record), None
    known = FORMATS[name]
    if missing := known.missing(record):
        raise InputError(
            f"has no column {missing[0]}, which data.format {name} needs, only"
            f" {', '.join(map(str, record)) or 'none at all'}",
            where=place,
            fix="Name it with data.columns, or leave data.format out: formats are recognised.",
        )
    found = {} if templated else known.prompt(record, place)
    answers = known.answers(record, place)
    if templated:
        answers.pop("prompt", None)
    columns = tuple(column for column in dict.fromkeys(known.names) if has(record, column))
    return {**record, **found, **answers}, ReadAs(name, columns, templated)


def recognised(record: Record) -> str | None:
    """The name of the first format that fits."""
    return next(
        (
            name
            for name, format in FORMATS.items()
            if not format.missing(record) and format.fits(record)
        ),
        None,
    )


def with_column(ours: str) -> list[str]:
    """The formats whose rows have this column of ours."""
    return [name for name, format in FORMATS.items() if ours in format.becomes]


def nearest(record: Record) -> list[str]:
    """Sentences about the formats that a row comes closest to, by the names of its columns."""
    ranked = sorted(
        ((score, name) for name in FORMATS if (score := _closeness(FORMATS[name], record)) > 0),
        key=lambda pair: -pair[0],
    )
    return [_needs(name, record) for _, name in ranked[:SHOWN]]


def _closeness(format: Format, record: Record) -> float:
    """The share of its groups of columns for which there is one, or one of a similar name."""
    found = sum(any(_similar(name, record) for name in group) for group in format.columns)
    return found / len(format.columns)


def _similar(name: str, record: Record) -> str | None:
    if has(record, name):
        return name
    by_lower = {str(column).lower(): str(column) for column in record}
    close = difflib.get_close_matches(name, by_lower, n=1, cutoff=0.75)
    return by_lower[close[0]] if close else None


def _needs(name: str, record: Record) -> str:
    groups = []
    for group in FORMATS[name].columns:
        here = next((found for one in group if (found := _similar(one, record))), None)
        wanted = " or ".join(group)
        groups.append(wanted if here in (None, *group) else f"{wanted} (here: {here})")
    return f"{name} has {', '.join(groups)}"
