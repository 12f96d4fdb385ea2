"""Several sources in given shares.

Which source a draw comes from is a function of how many were drawn, so resuming is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reinforge.core.errors import InputError
from reinforge.data.cursor import Cursor


class MixtureCursor(Cursor):
    """A walk over rows of several sources, each with its own order and epochs.

    The next draw goes to the source that is furthest behind its share: after any number of draws
    each source has its share to within one row or so, and so has every step.

    >>> weights = {"a": 3.0, "b": 1.0}
    >>> cursor = MixtureCursor({"a": [0, 1, 2], "b": [3]}, weights, seed=0, shuffle=False)
    >>> cursor.take(8)
    [0, 1, 3, 2, 0, 1, 3, 2]
    """

    def __init__(
        self,
        rows: Mapping[str, Sequence[int]],
        weights: Mapping[str, float],
        seed: int,
        shuffle: bool,
        *,
        fingerprint: str = "",
    ):
        super().__init__(sum(map(len, rows.values())), seed, shuffle, fingerprint=fingerprint)
        empty = [name for name in weights if not rows.get(name)]
        if empty:
            raise InputError(
                f"{empty[0]} has no rows left to train on.",
                where="data.mixture",
                fix="Remove it, or look at data.max_length.",
            )
        total = sum(weights.values())
        self.rows = {name: list(rows[name]) for name in weights}
        self.shares = {name: weight / total for name, weight in weights.items()}
        self.cursors = {name: Cursor(len(rows[name]), seed, shuffle) for name in weights}

    def take(self, k: int) -> list[int]:
        if k < 0:
            raise ValueError(f"cannot take {k} rows")
        return [self._next() for _ in range(k)]

    def _next(self) -> int:
        self.taken += 1
        name = max(self.shares, key=lambda n: self.shares[n] * self.taken - self.cursors[n].taken)
        return self.rows[name][self.cursors[name].take(1)[0]]

    def state(self) -> dict[str, Any]:
        return {
            **super().state(),
            "shares": self.shares,
            "drawn": {name: cursor.taken for name, cursor in self.cursors.items()},
        }

    def load(self, state: dict[str, Any]) -> None:
        if state.get("shares") != self.shares:
            raise InputError(
                "the checkpoint was made with another mixture: rows would repeat or be missed",
                where="data.mixture",
                fix="Restore the sources and weights, or start a new run in another run.dir.",
            )
        super().load(state)
        for name, cursor in self.cursors.items():
            cursor.taken = state["drawn"][name]
