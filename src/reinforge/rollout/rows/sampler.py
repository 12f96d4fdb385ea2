"""Which rows a step takes next: rows are met in the cursor's order, and each policy says with what
probability a row is taken.

The coin is a hash of (run seed, position), the probability a function of what was known at the
step's start. So a choice is a function of the checkpoint, and a step that was cut chooses the same
rows again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from reinforge.core.errors import InputError
from reinforge.core.row import Row
from reinforge.core.seeds import seed_of
from reinforge.data.cursor import Cursor
from reinforge.rollout.rows.pass_rates import PassRates


@dataclass(frozen=True, slots=True)
class RowChoice:
    """A row that was chosen for a step. `RowSampler.take` makes it; the name of the group comes
    from it.
    """

    position: int  # in the cursor's endless walk: no two groups of a run share one
    row: int


class RowWeighting(Protocol):
    """Says how likely a row is taken: a curriculum, a filter by pass rate. `RowSampler` multiplies
    what all of them say.
    """

    def weigh(self, row: int, step: int) -> float:
        """The probability that row number `row`, met in this step, is taken. 0: not now."""
        ...

    def report(self, step: int) -> dict[str, float]: ...


class RowSampler:
    """Chooses the rows of a step, for a group source. Without policies it is the cursor; with
    several, a row is taken with the product of their probabilities.

    It always comes to an end: when a whole epoch went by without one row taken, the coins are left
    out for the rest of the call (every row of probability above 0 is taken), and after a second
    such epoch so are the policies.
    """

    def __init__(self, cursor: Cursor, seed: int, policies: Sequence[RowWeighting] = ()):
        self.cursor = cursor
        self.seed = seed
        self.policies = list(policies)

    def take(self, k: int, step: int = 0) -> list[RowChoice]:
        first = self.cursor.taken
        if not self.policies:
            return [RowChoice(first + i, row) for i, row in enumerate(self.cursor.take(k))]
        chosen: list[RowChoice] = []
        missed = patience = 0
        while len(chosen) < k:
            position = self.cursor.taken
            (row,) = self.cursor.take(1)
            if patience == 2 or self._takes(row, position, step, sure=patience == 1):
                chosen.append(RowChoice(position, row))
                missed = 0
                continue
            missed += 1
            if missed == self.cursor.n:
                patience = patience + 1
                missed = 0
        return chosen

    def _takes(self, row: int, position: int, step: int, sure: bool) -> bool:
        probability = 1.0
        for policy in self.policies:
            probability *= policy.weigh(row, step)
            if not probability:
                return False
        return sure or coin(self.seed, position) < probability

    def report(self, step: int) -> dict[str, float]:
        return {
            name: value for policy in self.policies for name, value in policy.report(step).items()
        }


def coin(seed: int, position: int) -> float:
    """Uniform in [0, 1), one for each position of the walk."""
    return (seed_of(seed, "choose", position) >> 10) / 2**53


class GivenWeighting:
    """Takes rows as a function of a Python caller's says: `(row, step)` gives the probability, with
    steps counted from 0. Builders make it.
    """

    def __init__(self, rows: Sequence[Row], function: Callable[[Row, int], float]):
        self.rows = rows
        self.function = function

    def weigh(self, row: int, step: int) -> float:
        name = getattr(self.function, "__name__", "the function")
        try:
            found = float(self.function(self.rows[row], step))
        except Exception as error:
            raise InputError(
                f"{name} raised {type(error).__name__}: {error}.",
                where="sampler",
                fix="It is called with a row and the number of the step, from 0. Repair it.",
            ) from error
        if not 0.0 <= found <= 1.0:
            raise InputError(
                f"{name} returned {found:g} for row {self.rows[row].id}.",
                where="sampler",
                fix="Return the probability that the row is taken, from 0 to 1.",
            )
        return found

    def report(self, step: int) -> dict[str, float]:
        return {}


class TeachableWeighting:
    """Takes a row with probability 4 p (1 - p), which is 1 at p = 1/2 and the variance of a
    pass/fail reward at any p, up to scale: a group can teach only where its samples differ. Unknown
    rows are always taken; solved, hopeless and nearly so ones are looked at again with probability
    `recheck`, since the policy moves on and forgets.
    """

    def __init__(self, rates: PassRates, recheck: float = 0.05):
        self.rates = rates
        self.recheck = recheck

    def weigh(self, row: int, step: int) -> float:
        status = self.rates.status(row)
        if status == "unknown":
            return 1.0
        p = self.rates.rate(row)
        assert p is not None
        return max(self.recheck, 4 * p * (1 - p)) if status == "teachable" else self.recheck

    def report(self, step: int) -> dict[str, float]:
        return {}  # the store reports the shares
