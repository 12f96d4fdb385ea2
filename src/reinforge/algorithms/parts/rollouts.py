"""What an advantage is given: the whole optimizer batch as flat vectors, and the settings.

Legend: M trained tokens, S rows (samples).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from reinforge.core.batch import Batch
from reinforge.core.sample import Sample, Stop

Scale = Literal["group", "batch", "none"]


@dataclass(frozen=True)
class Rollouts:
    """An optimizer batch as an advantage sees it. All tensors are on the CPU."""

    rewards: Tensor  # [S] float64 or float32; nan = unscored
    group: Tensor  # [S] int64: rows of one prompt share it, in any order
    episode: Tensor  # [S] int64: rows forked from one episode share it and count once in statistics
    sequence: Tensor  # [M] int64: which row a trained token belongs to
    lengths: Tensor  # [S] int64: trained tokens of each row
    # [M] each: behaviour, old, reference, values, ...
    streams: Mapping[str, Tensor] = field(default_factory=dict)
    token_rewards: Tensor | None = None  # [M]: per turn, per step, distillation, KL in the reward
    truncated: Tensor | None = None  # [S] bool: cut off by the token limit
    # [S] float64 each: the parts of the reward; nan = not scored
    components: Mapping[str, Tensor] = field(default_factory=dict)
    # [S] float64: reward of the greedy rollout of the row's prompt; nan = none
    baseline: Tensor | None = None
    # [S]: value of the state after the last token of a truncated row; 0 where it ended by itself
    bootstrap: Tensor | None = None

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> Rollouts:
        """Gathers the packs of one optimizer batch, in their order."""
        samples = [s for batch in batches for s in batch.samples]
        first = [sum(len(b.samples) for b in batches[:i]) for i in range(len(batches))]
        groups = {name: i for i, name in enumerate(dict.fromkeys(s.group for s in samples))}
        episodes = {name: i for i, name in enumerate(dict.fromkeys(s.episode for s in samples))}
        bootstrap = [b.bootstrap.cpu() for b in batches if b.bootstrap is not None]
        return cls(
            rewards=_numbers([s.reward for s in samples]),
            group=torch.tensor([groups[s.group] for s in samples], dtype=torch.int64),
            episode=torch.tensor([episodes[s.episode] for s in samples], dtype=torch.int64),
            sequence=torch.cat([b.sequence.cpu() + n for b, n in zip(batches, first, strict=True)]),
            lengths=torch.cat([b.trained_lengths().cpu() for b in batches]),
            streams={
                name: torch.cat([b.streams[name].cpu() for b in batches])
                for name in batches[0].streams
            },
            token_rewards=_token_rewards(samples),
            truncated=torch.tensor([s.stop is Stop.LENGTH for s in samples], dtype=torch.bool),
            components={
                n: _numbers([s.rewards.get(n) for s in samples])
                for n in sorted({n for s in samples for n in s.rewards})
            },
            baseline=(
                _numbers([s.baseline for s in samples])
                if any(s.baseline is not None for s in samples)
                else None
            ),
            bootstrap=torch.cat(bootstrap) if len(bootstrap) == len(batches) else None,
        )

    @cached_property
    def totals(self) -> Tensor:
        """[S] float64: the reward plus all token rewards of the row's episode, so that KL in the
        reward and rewards of single turns count in group statistics. nan = unscored. Rows in
        another order give the same bits.
        """
        rewards_S = self.rewards.double()
        if self.token_rewards is None:
            return rewards_S
        assert self.token_rewards.shape == self.sequence.shape
        sum_S = torch.zeros_like(rewards_S).index_add_(
            0, self.sequence, self.token_rewards.double()
        )
        episodes, index = self.episode.unique(return_inverse=True)
        order = sum_S.argsort(stable=True)
        sum_E = torch.zeros(len(episodes), dtype=torch.float64).index_add_(
            0, index[order], sum_S[order]
        )
        return rewards_S + sum_E[index]

    def with_token_rewards(self, extra: Tensor) -> Rollouts:
        """The same rollouts with `extra` [M] added to the reward of each token."""
        assert extra.shape == self.sequence.shape, (
            f"one number per trained token, not {tuple(extra.shape)}"
        )
        return replace(
            self, token_rewards=extra if self.token_rewards is None else self.token_rewards + extra
        )


@dataclass(frozen=True)
class AdvantageOptions:
    """The settings of an advantage.

    `ADVANTAGES` in algorithms/catalogue.py says which function reads which.
    """

    scale: Scale = "group"  # divide by the std of the group, of the batch, or not at all
    std: Literal["sample", "population"] = "sample"  # ddof 1 or 0
    eps: float = 1e-4  # added to what is divided by: reward noise below it is not amplified
    gamma: float = 1.0  # discount per token
    lam: float = 0.95  # of GAE
    lam_critic: float | None = None  # of the critic's targets; None = that of the advantages
    # lam = 1 - 1 / (alpha * length of the row), for the advantages (VAPO); None = `lam`
    length_alpha: float | None = None
    whiten: bool | None = None  # mean 0 and std 1 over the batch; None = the function's own default
    clip: float | None = None  # bound of |A|, applied last and by whoever calls the function
    k: int = 4  # of pass_at_k
    # of reward components; one that is not named counts 1
    weights: Mapping[str, float] = field(default_factory=dict)


def _numbers(values: Sequence[float | None]) -> Tensor:
    return torch.tensor([float("nan") if v is None else v for v in values], dtype=torch.float64)


def _token_rewards(samples: Sequence[Sample]) -> Tensor | None:
    if all(s.token_rewards is None for s in samples):
        return None
    return torch.cat(
        [
            (torch.zeros(len(s.tokens)) if s.token_rewards is None else s.token_rewards)[s.trained]
            for s in samples
        ]
    )
