"""Easy rows first: in step t only rows up to a quantile of difficulty are taken, and the quantile
grows linearly with t.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reinforge.core.errors import InputError
from reinforge.core.sample import Row
from reinforge.rollout.rows.pass_rates import PassRates


@dataclass(frozen=True, slots=True)
class QuantileRamp:
    """Which share of the rows, the easiest first, is allowed in a step: q(t) = start + (end -
    start) * min(1, t / steps), and at least the `least` easiest rows. A curriculum asks it for the
    largest difficulty.
    """

    start: float
    end: float
    steps: int
    least: int = 1

    def quantile(self, step: int) -> float:
        return self.start + (self.end - self.start) * min(1.0, step / self.steps)

    def limit(self, difficulty: Tensor, step: int) -> float:
        """The largest difficulty allowed in this step, ties included; no limit where there is
        nothing to compare.
        """
        n = len(difficulty)
        if not n:
            return math.inf
        allowed = min(n, max(self.least, math.ceil(self.quantile(step) * n - 1e-9), 1))
        return float(difficulty.sort().values[allowed - 1])


def difficulties(rows: Sequence[Row], column: str) -> list[float]:
    """The declared difficulty of every row, each a finite number."""
    out = []
    for row in rows:
        value = row.columns.get(column)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            found = (
                f"is {value!r}"
                if column in row.columns
                else f"is missing (columns: {', '.join(row.columns)})"
            )
            raise InputError(
                f"{column} {found}, and a curriculum needs a number.",
                where=f"sampling.curriculum.column, row {row.id}",
                fix=(
                    "Name a column that holds a number in every row, or leave it out to learn the"
                    " difficulty."
                ),
            )
        out.append(float(value))
    return out


class DeclaredDifficulty:
    """A curriculum by a column of the data: rows above the difficulty of the step are not taken. A
    `RowWeighting`; `RowSampler` asks it.
    """

    def __init__(self, difficulty: Sequence[float], ramp: QuantileRamp):
        self.difficulty = torch.tensor(difficulty, dtype=torch.float64)
        self.ramp = ramp
        self._limit = (-1, 0.0)  # (step, limit): sorted once a step

    def limit(self, step: int) -> float:
        if self._limit[0] != step:
            self._limit = (step, self.ramp.limit(self.difficulty, step))
        return self._limit[1]

    def weigh(self, row: int, step: int) -> float:
        return float(self.difficulty[row] <= self.limit(step))

    def report(self, step: int) -> dict[str, float]:
        return {
            "sampling/quantile": self.ramp.quantile(step),
            "sampling/difficulty_limit": self.limit(step),
        }


class LearnedDifficulty:
    """Difficulty is 1 - the estimated pass rate, and the quantile is one of the known rows.

    Unknown rows are always allowed: otherwise they would never become known.
    """

    def __init__(self, rates: PassRates, ramp: QuantileRamp):
        self.rates = rates
        self.ramp = ramp
        self._limit = (-1, 0.0)

    def limit(self, step: int) -> float:
        if self._limit[0] != step:  # the store changes between steps only
            self._limit = (step, self.ramp.limit(1 - self.rates.rates()[self.rates.known()], step))
        return self._limit[1]

    def weigh(self, row: int, step: int) -> float:
        rate = self.rates.rate(row)
        return (
            1.0
            if rate is None or self.rates.status(row) == "unknown"
            else float(1 - rate <= self.limit(step))
        )

    def report(self, step: int) -> dict[str, float]:
        limit = self.limit(step)
        return {"sampling/quantile": self.ramp.quantile(step)} | (
            {"sampling/difficulty_limit": limit} if math.isfinite(limit) else {}
        )
