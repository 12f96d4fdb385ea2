"""Statistics over episodes and over tokens that do not change by a bit when the rows come in
another order.

Legend: M trained tokens, S rows (samples), E scored episodes, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reinforge.algorithms.parts.rollouts import AdvantageOptions, Rollouts
from reinforge.core.errors import InputError


@dataclass(frozen=True)
class GroupMoments:
    """Per group, each [G] float64."""

    n: Tensor
    mean: Tensor
    var: Tensor
    low: Tensor
    high: Tensor

    @property
    def signal(self) -> Tensor:
        """[G] bool: at least two episodes that differ.

        Three times 0.1 has a mean that is not 0.1, so differences from it say nothing.
        """
        return (self.n >= 2) & (self.high > self.low)


@dataclass(frozen=True)
class ScoredEpisodes:
    """The scored episodes of a batch, each once, sorted by value and then by length: sums over them
    have one order only.
    """

    value: Tensor  # [E] float64
    length: Tensor  # [E] float64: trained tokens, over all rows
    group: Tensor  # [E] int64, 0 to n_groups - 1
    n_groups: int
    row: Tensor  # [S] int64: which of these episodes a row belongs to; -1 = the row is unscored

    @classmethod
    def of(
        cls, rollouts: Rollouts, values_S: Tensor | None = None, what: str = "rewards"
    ) -> ScoredEpisodes:
        """Of `values_S` (nan = unscored), or of the total rewards.

        Rows of one episode must agree on value and group.
        """
        assert (
            rollouts.rewards.shape
            == rollouts.group.shape
            == rollouts.episode.shape
            == rollouts.lengths.shape
        )
        values_S = (rollouts.totals if values_S is None else values_S).double()
        groups, group_S = rollouts.group.unique(return_inverse=True)
        episodes, index = rollouts.episode.unique(return_inverse=True)
        scored = ~values_S.isnan()
        value = torch.full((len(episodes),), -torch.inf, dtype=torch.float64).scatter_reduce_(
            0, index[scored], values_S[scored], "amax"
        )
        group = torch.zeros(len(episodes), dtype=torch.int64).scatter_(0, index, group_S)
        if not torch.equal(group[index], group_S):
            raise InputError(
                "rows of one episode are in different groups",
                where="Sample.group",
                fix="Give forked rows their episode's group.",
            )
        if not torch.equal(value[index][scored], values_S[scored]):
            raise InputError(
                f"rows of one episode have different {what}",
                where="Sample.reward",
                fix=(
                    "Give forked rows their episode's reward, and per-turn rewards as"
                    " token_rewards."
                ),
            )
        length = torch.zeros(len(episodes), dtype=torch.int64).index_add_(
            0, index, rollouts.lengths
        )
        order = length.argsort(stable=True)
        order = order[value[order].argsort(stable=True)]
        order = order[value[order] > -torch.inf]
        place = torch.full((len(episodes),), -1, dtype=torch.int64)
        place[order] = torch.arange(len(order))
        return cls(
            value[order],
            length[order].double(),
            group[order],
            len(groups),
            torch.where(scored, place[index], -1),
        )

    def sums(self, values_E: Tensor) -> Tensor:
        """[G] sums per group."""
        return torch.zeros(self.n_groups, dtype=torch.float64).index_add_(0, self.group, values_E)

    def moments(self, std: str) -> GroupMoments:
        """Two passes: rewards of 1e6 with a spread of 1 lose nothing."""
        n = self.sums(torch.ones_like(self.value))
        mean = self.sums(self.value) / n.clamp(min=1)
        var = self.sums((self.value - mean[self.group]) ** 2) / (n - int(std == "sample")).clamp(
            min=1
        )
        low = torch.full((self.n_groups,), torch.inf, dtype=torch.float64).scatter_reduce_(
            0, self.group, self.value, "amin"
        )
        high = torch.full((self.n_groups,), -torch.inf, dtype=torch.float64).scatter_reduce_(
            0, self.group, self.value, "amax"
        )
        return GroupMoments(n, mean, var, low, high)

    def pooled(self) -> ScoredEpisodes:
        """The same episodes as one group: the batch."""
        return ScoredEpisodes(self.value, self.length, torch.zeros_like(self.group), 1, self.row)

    def spread(self, values_E: Tensor) -> Tensor:
        """[S]: each row gets its episode's value; unscored rows get 0."""
        return torch.where(
            self.row >= 0, torch.cat([values_E, values_E.new_zeros(1)])[self.row], 0.0
        )


def whiten(values_M: Tensor, counted_M: Tensor, options: AdvantageOptions) -> Tensor:
    """(x - mean) / (std + eps) over the tokens where `counted_M`, every token counting once; 0
    elsewhere, and everywhere when all are equal.
    """
    counted = values_M[counted_M].sort().values
    if not len(counted) or not counted[-1] > counted[0]:
        return torch.zeros_like(values_M)
    mean = counted.sum() / len(counted)
    var = (counted - mean).square().sum() / max(len(counted) - int(options.std == "sample"), 1)
    return torch.where(counted_M, (values_M - mean) / (var.sqrt() + options.eps), 0.0)
