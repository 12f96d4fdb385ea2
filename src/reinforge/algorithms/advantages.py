"""Advantages: from the rewards of a whole optimizer batch to one number per trained token.

An advantage is `fn(rollouts, options) -> [M]`. It runs once, before the batch is cut, so its statistics are global.

Legend: M trained tokens, S rows (samples), E episodes, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from reinforge.core.batch import Batch
from reinforge.core.errors import InputError
from reinforge.core.sample import Stop

Scale = Literal["group", "batch", "none"]


@dataclass(frozen=True)
class Rollouts:
    """An optimizer batch as an advantage sees it. All tensors are on the CPU."""

    rewards: Tensor  # [S] float64 or float32; nan = unscored
    group: Tensor  # [S] int64: rows of one prompt share it, in any order
    episode: Tensor  # [S] int64: rows forked from one episode share it and count once in statistics
    sequence: Tensor  # [M] int64: which row a trained token belongs to
    lengths: Tensor  # [S] int64: trained tokens of each row
    streams: Mapping[str, Tensor] = field(default_factory=dict)  # [M] each: behaviour, old, reference, values, ...
    token_rewards: Tensor | None = None  # [M]: per turn, per step, distillation
    truncated: Tensor | None = None  # [S] bool: cut off by the token limit

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> Rollouts:
        """Gathers the packs of one optimizer batch, in their order."""
        samples = [s for batch in batches for s in batch.samples]
        first = [sum(len(b.samples) for b in batches[:i]) for i in range(len(batches))]
        groups = {name: i for i, name in enumerate(dict.fromkeys(s.group for s in samples))}
        episodes = {name: i for i, name in enumerate(dict.fromkeys(s.episode for s in samples))}
        given = [s.token_rewards is not None for s in samples]
        token_rewards = [torch.zeros(len(s.tokens))[s.trained] if s.token_rewards is None else s.token_rewards[s.trained] for s in samples]
        return cls(
            rewards=torch.tensor([float("nan") if s.reward is None else s.reward for s in samples], dtype=torch.float64),
            group=torch.tensor([groups[s.group] for s in samples], dtype=torch.int64),
            episode=torch.tensor([episodes[s.episode] for s in samples], dtype=torch.int64),
            sequence=torch.cat([b.sequence.cpu() + n for b, n in zip(batches, first, strict=True)]),
            lengths=torch.cat([b.trained_lengths().cpu() for b in batches]),
            streams={name: torch.cat([b.streams[name].cpu() for b in batches]) for name in batches[0].streams},
            token_rewards=torch.cat(token_rewards) if any(given) else None,
            truncated=torch.tensor([s.stop is Stop.LENGTH for s in samples], dtype=torch.bool),
        )


@dataclass(frozen=True)
class AdvantageOptions:
    scale: Scale = "group"  # divide by the std of the group, of the batch, or not at all
    std: Literal["sample", "population"] = "sample"  # ddof 1 or 0
    eps: float = 1e-4  # added to the std: reward noise below it is not amplified


Advantage = Callable[[Rollouts, AdvantageOptions], Tensor]


def group_relative(rollouts: Rollouts, options: AdvantageOptions) -> Tensor:
    """A = (r - mean_G) / (std_G + eps), the same for every token of a row (GRPO, 2402.03300 eq. 3).

    scale "batch" divides by the std of all rewards of the batch instead, "none" (Dr. GRPO, 2503.20783) by nothing.
    Exactly 0 in a group whose rewards are all equal or of which fewer than two are scored; 0 for unscored rows.
    Computed in float64 from sorted rewards, so the order of the rows cannot change a bit; returned in the rewards' dtype.
    """
    assert rollouts.rewards.shape == rollouts.group.shape == rollouts.episode.shape == rollouts.lengths.shape
    rewards_S = rollouts.rewards.double()
    groups, group_S = rollouts.group.unique(return_inverse=True)
    reward_E, group_E = _once_per_episode(rewards_S, group_S, rollouts.episode)

    n, mean, var, low, high = _moments(reward_E, group_E, len(groups), options.std)
    signal = (n >= 2) & (high > low)
    advantage_S = rewards_S - mean[group_S]
    if options.scale == "group":
        advantage_S = advantage_S / (var.sqrt()[group_S] + options.eps)
    elif options.scale == "batch":
        _, _, batch_var, _, _ = _moments(reward_E, torch.zeros_like(group_E), 1, options.std)
        advantage_S = advantage_S / (batch_var.sqrt() + options.eps)
    advantage_S = torch.where(signal[group_S] & ~rewards_S.isnan(), advantage_S, 0.0)
    return advantage_S.to(rollouts.rewards.dtype)[rollouts.sequence]


def _once_per_episode(rewards_S: Tensor, group_S: Tensor, episode_S: Tensor) -> tuple[Tensor, Tensor]:
    """The scored episodes as (reward [E], group [E]), sorted by reward. Rows of one episode must agree on both."""
    episodes, index = episode_S.unique(return_inverse=True)
    scored = ~rewards_S.isnan()
    reward_E = torch.full((len(episodes),), -torch.inf, dtype=torch.float64)
    reward_E.scatter_reduce_(0, index[scored], rewards_S[scored], "amax")
    group_E = torch.zeros(len(episodes), dtype=torch.int64).scatter_(0, index, group_S)
    if not torch.equal(group_E[index], group_S):
        raise InputError("rows of one episode are in different groups", where="Sample.group", fix="Give forked rows their episode's group.")
    if not torch.equal(reward_E[index][scored], rewards_S[scored]):
        raise InputError("rows of one episode have different rewards", where="Sample.reward",
                         fix="Give forked rows their episode's reward, and per-turn rewards as token_rewards.")  # fmt: skip
    order = reward_E.argsort(stable=True)
    order = order[reward_E[order] > -torch.inf]
    return reward_E[order], group_E[order]


def _moments(reward_E: Tensor, group_E: Tensor, n_groups: int, std: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Count, mean, variance, min and max per group, each [G]. Two passes: rewards of 1e6 with a spread of 1 lose nothing."""

    def per_group(values: Tensor) -> Tensor:
        return torch.zeros(n_groups, dtype=torch.float64).index_add_(0, group_E, values)

    n = per_group(torch.ones_like(reward_E))
    mean = per_group(reward_E) / n.clamp(min=1)
    var = per_group((reward_E - mean[group_E]) ** 2) / (n - int(std == "sample")).clamp(min=1)
    low = torch.full((n_groups,), torch.inf, dtype=torch.float64).scatter_reduce_(0, group_E, reward_E, "amin")
    high = torch.full((n_groups,), -torch.inf, dtype=torch.float64).scatter_reduce_(0, group_E, reward_E, "amax")
    return n, mean, var, low, high
