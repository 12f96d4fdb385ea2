"""The metrics of a run by name instead of by step, for curves: what is in metrics.jsonl, turned
around as it is read.
"""

from __future__ import annotations

import math
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

Point = list[float | None]  # [step, minutes, value], evaluations with low and high
EVALUATION = "eval/"
HIDDEN = re.compile(r"(share|time)/|eval/.*_(low|high)$|step$|time$|nonfinite$")


def number(value: Any) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return None


def turn(
    names: Sequence[str], block: Sequence[Mapping[str, Any]]
) -> dict[str, array[float]] | None:
    """Lines with the same names, in the same order, as one column for each name; None where one of
    them has something else than numbers.

    >>> turn(["a", "b"], [{"a": 1, "b": 0.5}, {"a": 2, "b": 1.5}])
    {'a': array('d', [1.0, 2.0]), 'b': array('d', [0.5, 1.5])}
    >>> turn(["a"], [{"a": 1.0}, {"a": None}])
    """
    values = [value for line in block for value in line.values()]
    if not set(map(type, values)) <= {float, int}:
        return None
    try:
        told = array("d", values)
    except OverflowError:  # a whole number of hundreds of digits
        return None
    return {name: told[i :: len(names)] for i, name in enumerate(names)}


@dataclass
class MetricColumn:
    """One metric: the lines that have it, and its values there; NaN where it was not finite."""

    lines: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def total(self, first: int, last: int) -> float:
        """The sum of the finite values from one line to another, both included."""
        begin, end = bisect_left(self.lines, first), bisect_right(self.lines, last)
        return sum(value for value in self.values[begin:end] if value == value)


class MetricColumns:
    """All metrics of a run. Whoever reads its lines adds them, in any number of parts."""

    def __init__(self, lines: Iterable[Mapping[str, Any]] = ()):
        self.steps: array[float] = array("d")
        self.times: array[float] = array("d")
        self.columns: dict[str, MetricColumn] = {}
        self.add(lines)

    def add(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Lines in the order of the file. Those without step and time are left out."""
        told = (
            line
            for line in lines
            if number(line.get("step")) is not None and number(line.get("time")) is not None
        )
        # most lines have the names of the line before: whole columns of them are added at once
        for names, block in groupby(told, key=tuple):
            self._add_block(names, list(block))

    def _add_block(self, names: Sequence[str], block: Sequence[Mapping[str, Any]]) -> None:
        first = len(self.steps)
        self.steps.extend(line["step"] for line in block)
        self.times.extend(line["time"] for line in block)
        lines = array("q", range(first, first + len(block)))
        turned = turn(names, block)
        for name in names:
            if name in ("step", "time", "nonfinite"):
                continue
            column = self.columns.get(name)
            if column is None:
                column = self.columns[name] = MetricColumn()
            if turned is not None:
                column.lines.extend(lines)
                column.values.extend(turned[name])
                continue
            for i, line in enumerate(block):
                value = number(line[name])
                if value is not None or name in (line.get("nonfinite") or ()):
                    column.lines.append(first + i)
                    column.values.append(math.nan if value is None else value)

    def names(self) -> list[str]:
        """Metrics that are drawn, in the order in which they came."""
        return [n for n, c in self.columns.items() if c.lines and not HIDDEN.match(n)]

    def value_at(self, name: str, line: int) -> float | None:
        """Of one line; None where it has none, or none that is finite."""
        column = self.columns.get(name)
        if column is None:
            return None
        place = bisect_left(column.lines, line)
        if place == len(column.lines) or column.lines[place] != line:
            return None
        return _known(column.values[place])

    def points(self, name: str, most: int) -> list[Point]:
        """The curve of a metric.

        At most `most` points: means over equal bins; a bin with nothing finite stays without a
        value, a mark in the curve and not a gap in silence. Evaluations are all there, each with
        its interval.
        """
        column = self.columns[name]
        if name.startswith(EVALUATION):
            return [self._evaluation(name, i) for i in range(len(column.lines))]
        size = max(1, -(-len(column.lines) // most))
        found: list[Point] = []
        for begin in range(0, len(column.lines), size):
            values = column.values[begin : begin + size]
            last = column.lines[min(begin + size, len(column.lines)) - 1]
            mean = sum(values) / len(values)
            if mean != mean:
                finite = [value for value in values if value == value]
                mean = sum(finite) / len(finite) if finite else math.nan
            found.append([self.steps[last], self._minutes(last), _known(mean)])
        return found

    def _evaluation(self, name: str, i: int) -> Point:
        column = self.columns[name]
        line = column.lines[i]
        bounds = [self.value_at(f"{name}_{end}", line) for end in ("low", "high")]
        return [self.steps[line], self._minutes(line), _known(column.values[i]), *bounds]

    def _minutes(self, line: int) -> float:
        """Since the first line."""
        return round((self.times[line] - self.times[0]) / 60, 3)


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
