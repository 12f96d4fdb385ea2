"""Which row comes next. One number says where we are, so resuming is exact and costs nothing."""

from __future__ import annotations

import random
from typing import Any

from reinforge.core.errors import InputError
from reinforge.core.seeds import seed_of


class Cursor:
    """An endless walk over n rows: each epoch is a permutation of its own, and every row comes once
    in each.

    >>> cursor = Cursor(3, seed=0, shuffle=False)
    >>> cursor.take(4), cursor.epoch == 4 / 3
    ([0, 1, 2, 0], True)
    """

    def __init__(self, n: int, seed: int, shuffle: bool, *, fingerprint: str = ""):
        """`fingerprint` (of the rows) is optional; with it, a data set that changed but kept its
        size is noticed too.
        """
        if n < 1:
            raise InputError("there are no rows to walk over", where="data")
        self.n = n
        self.seed = seed
        self.shuffle = shuffle
        self.fingerprint = fingerprint
        self.taken = 0  # rows given out so far
        self._order: list[int] = []
        self._order_epoch = -1

    @property
    def epoch(self) -> float:
        """Passes made so far, e.g. 1.5."""
        return self.taken / self.n

    def order(self, epoch: int) -> list[int]:
        """The permutation of one epoch; depends on (seed, epoch) and n alone."""
        if self._order_epoch != epoch:
            self._order = list(range(self.n))
            if self.shuffle:
                random.Random(seed_of(self.seed, "shuffle", epoch)).shuffle(self._order)
            self._order_epoch = epoch
        return self._order

    def take(self, k: int) -> list[int]:
        """The next k row indices, across as many epoch ends as it needs."""
        if k < 0:
            raise ValueError(f"cannot take {k} rows")
        rows: list[int] = []
        while len(rows) < k:
            epoch, offset = divmod(self.taken, self.n)
            piece = self.order(epoch)[offset : offset + k - len(rows)]
            rows.extend(piece)
            self.taken += len(piece)
        return rows

    def state(self) -> dict[str, Any]:
        return {
            "n": self.n,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "fingerprint": self.fingerprint,
            "taken": self.taken,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continues exactly where `state` was taken; refuses a state of other data or of another
        order.
        """
        if state["n"] != self.n:
            raise InputError(
                f"the checkpoint was made with {state['n']} rows, now there are {self.n}: the data"
                " set changed",
                where="data",
                fix=(
                    "Restore the data set, or start a new run (run.resume: never, another run.dir)."
                ),
            )
        if state["fingerprint"] and self.fingerprint and state["fingerprint"] != self.fingerprint:
            raise InputError(
                "the checkpoint was made with other rows (the number is the same, the contents are"
                " not)",
                where="data",
                fix="Restore the data set, or start a new run in another run.dir.",
            )
        for name, key in (("seed", "run.seed"), ("shuffle", "data.shuffle")):
            if state[name] != getattr(self, name):
                raise InputError(
                    f"the checkpoint was made with {key} {state[name]}, now it is"
                    f" {getattr(self, name)}: rows would repeat or be missed",
                    where=key,
                    fix=f"Set {key} to {state[name]} to resume.",
                )
        if not isinstance(state["taken"], int) or state["taken"] < 0:
            raise InputError(f"the cursor's position is {state['taken']!r}", where="checkpoint")
        self.taken = state["taken"]
