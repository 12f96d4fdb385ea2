"""What is known about each prompt: how often it was tried, and how often it was solved, lately more
than long ago.

One entry a row, in flat arrays. It changes at step boundaries only (`observe` is called with the
groups of a whole step), so a step that was cut has changed nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from reinforge.core.backend import State
from reinforge.core.errors import InputError
from reinforge.core.sample import Group

Status = Literal["unknown", "solved", "hopeless", "teachable"]
COLUMNS = ("attempts", "successes", "weight", "hits", "last")


@dataclass(frozen=True, slots=True)
class PassRateBands:
    """When a row counts as known, and which pass rates then mean that it can teach nothing.
    Settings of `sampling`, read by what weighs rows.
    """

    solved: float = 0.95  # at or above
    hopeless: float = 0.0  # at or below
    min_attempts: int = 8  # scored samples before a row is known


class PassRates:
    """How often the policy solves each row, as far as it was seen: attempts (scored samples),
    successes, the step of the last visit, and an estimate of the pass rate p that forgets. A group
    source tells it every step, row weightings ask it, checkpoints hold it.

    A visit with n scored samples, s of them (or s in sum of shares) successes, does
        weight <- decay * weight + n,    hits <- decay * hits + s,    p = hits / weight
    so evidence of k visits ago counts decay^k. A sample is a success when its reward is at least
    `success_at`; without that it counts reward / best, cut to [0, 1]: a partial reward is a partial
    success.
    """

    def __init__(
        self,
        ids: Sequence[str],
        *,
        decay: float = 0.5,
        success_at: float | None = None,
        best: float = 1.0,
        bands: PassRateBands = PassRateBands(),
    ):
        self.decay = decay
        self.success_at = success_at
        self.best = best
        self.bands = bands
        self.index = {name: i for i, name in enumerate(ids)}
        n = len(ids)
        self.attempts = torch.zeros(n, dtype=torch.int64)
        self.last = torch.full((n,), -1, dtype=torch.int64)  # step of the newest visit
        self.successes, self.weight, self.hits = (
            torch.zeros(n, dtype=torch.float64) for _ in range(3)
        )

    def success(self, reward: float) -> float:
        if self.success_at is not None:
            return float(reward >= self.success_at)
        return min(1.0, max(0.0, reward / self.best)) if self.best > 0 else 0.0

    def observe(self, groups: Iterable[Group], step: int) -> None:
        """Takes in the groups of one step, each a visit. Unscored samples say nothing."""
        for group in groups:
            scores = [self.success(s.reward) for s in group.episodes if s.reward is not None]
            i = self.index[group.row.id]
            if scores:
                self.attempts[i] += len(scores)
                self.successes[i] += sum(scores)
                self.weight[i] = self.decay * self.weight[i] + len(scores)
                self.hits[i] = self.decay * self.hits[i] + sum(scores)
            self.last[i] = step

    def rate(self, row: int) -> float | None:
        """The estimate of row number `row`; None while nothing is known about it."""
        weight = float(self.weight[row])
        return float(self.hits[row]) / weight if weight else None

    def known(self) -> torch.Tensor:
        """[n] bool."""
        return self.attempts >= self.bands.min_attempts

    def rates(self) -> torch.Tensor:
        """[n] float64, nan where nothing is known."""
        return self.hits / self.weight

    def status(self, row: int) -> Status:
        p = self.rate(row)
        if p is None or int(self.attempts[row]) < self.bands.min_attempts:
            return "unknown"
        return (
            "solved"
            if p >= self.bands.solved
            else "hopeless"
            if p <= self.bands.hopeless
            else "teachable"
        )

    def report(self) -> dict[str, float]:
        """Shares of all rows: known; of those retired as solved, given up as hopeless, and
        teachable. The mean estimate of the known.
        """
        known = self.known()
        rates = self.rates()
        n = max(1, len(self.attempts))
        solved = known & (rates >= self.bands.solved)
        hopeless = known & (rates <= self.bands.hopeless)
        shares = {
            "known": known,
            "retired": solved,
            "hopeless": hopeless & ~solved,
            "teachable": known & ~solved & ~hopeless,
        }
        out = {f"sampling/{name}": float(mask.sum()) / n for name, mask in shares.items()}
        return out | (
            {"sampling/pass_rate": float(rates[known].mean())} if bool(known.any()) else {}
        )

    # ---- a Part: only the rows that were visited are saved ----

    def state(self) -> State:
        rows = (self.last >= 0).nonzero()[:, 0]
        return State(
            {"rows": rows, **{name: getattr(self, name)[rows] for name in COLUMNS}},
            {"n": len(self.index)},
        )

    def load(self, state: State) -> None:
        if state.meta["n"] != len(self.index):
            raise InputError(
                f"the checkpoint knows the pass rates of {state.meta['n']} rows, now there are"
                f" {len(self.index)}.",
                where="data",
                fix="Restore the data set, or start a new run in another run.dir.",
            )
        rows = state.tensors["rows"]
        for name in COLUMNS:
            getattr(self, name).fill_(-1 if name == "last" else 0)[rows] = state.tensors[name]
