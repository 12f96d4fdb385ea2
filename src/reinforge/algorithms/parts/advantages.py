"""Advantages: from the rewards of a whole optimizer batch to one number per trained token.

An advantage is `fn(rollouts, options)`: it gives [M], or {"advantages": [M], "returns": [M] targets
for a critic}. It runs once, before the batch is cut, so its statistics are global. Those in this
file give every token of a row the same number, from r = the total reward of the row's episode
(`Rollouts.totals`); those of algorithms/parts/returns.py go token by token.

All of them: float64 inside, returned in the rewards' dtype; unscored rows get 0 and are left out of
every statistic; an episode counts once however many rows it was cut into; another order of the rows
does not change a bit.

Legend: M trained tokens, S rows (samples), E scored episodes, G groups; n_G scored episodes of a
group.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from reinforge.algorithms.parts.returns import gae, return_to_go
from reinforge.algorithms.parts.rollouts import AdvantageOptions, Rollouts
from reinforge.algorithms.parts.statistics import ScoredEpisodes, whiten
from reinforge.core.errors import InputError

Advantage = Callable[[Rollouts, AdvantageOptions], Tensor | dict[str, Tensor]]


def group_relative(rollouts: Rollouts, options: AdvantageOptions) -> Tensor:
    """A = (r - mean_G) / (std_G + eps) (GRPO, 2402.03300 eq. 3).

    scale "batch" divides by the std of all rewards of the batch instead, "none" (Dr. GRPO,
    2503.20783) by nothing. Exactly 0 in a group whose rewards are all equal or of which fewer than
    two are scored.
    """
    e = ScoredEpisodes.of(rollouts)
    m = e.moments(options.std)
    advantage_E = _centred(e)
    if options.scale == "group":
        advantage_E = advantage_E / (m.var.sqrt()[e.group] + options.eps)
    elif options.scale == "batch":
        advantage_E = advantage_E / (e.pooled().moments(options.std).var.sqrt() + options.eps)
    return _per_token(rollouts, e, advantage_E)


def batch_baseline(rollouts: Rollouts, options: AdvantageOptions) -> Tensor:
    """A = r - mean of the batch (REINFORCE with a baseline, Williams 1992). scale "batch" divides
    by the batch's std + eps; any other scale by nothing. Prompts share the baseline, so this works
    with one sample per prompt. Exactly 0 when all rewards are equal.
    """
    e = ScoredEpisodes.of(rollouts).pooled()
    advantage_E = _centred(e)
    if options.scale == "batch":
        advantage_E = advantage_E / (e.moments(options.std).var.sqrt() + options.eps)
    return _per_token(rollouts, e, advantage_E)


def leave_one_out(rollouts: Rollouts, options: AdvantageOptions) -> Tensor:
    """A_i = r_i - mean of the other n_G - 1 rewards of the group = (r_i - mean_G) n_G / (n_G - 1)
    (RLOO, 2402.14740).

    Exactly 0 in a group without signal. `whiten` (off) then whitens over the trained tokens of the
    batch.
    """
    e = ScoredEpisodes.of(rollouts)
    n = e.moments(options.std).n[e.group]
    values_M = _per_token(rollouts, e, _centred(e) * n / (n - 1).clamp(min=1))
    return _whitened(rollouts, values_M, options) if options.whiten else values_M


def group_whitened(rollouts: Rollouts, options: AdvantageOptions) -> Tensor:
    """A = (a - mean(a)) / (std(a) + eps) with a = r - mean_G (REINFORCE++-baseline, 2501.03262).

    Mean and std are over the trained tokens of all scored rows of the batch, where every token of a
    row carries the row's a: a long answer weighs as many times as it has tokens (so do veRL and
    OpenRLHF). So the mean of a is in general not 0, and groups without signal get -mean/std. When
    no group has signal, everything is exactly 0. `whiten: false` leaves a.
    """
    e = ScoredEpisodes.of(rollouts)
    values_M = _per_token(rollouts, e, _centred(e))
    return values_M if options.whiten is False else _whitened(rollouts, values_M, options)


def greedy_baseline(rollouts: Rollouts, options: AdvantageOptions) -> Tensor:
    """A = r - r(greedy rollout of the same prompt) (ReMax, 2310.10505).

    Works with one sample per prompt. 0 where the greedy rollout could not be scored. Token rewards
    (KL) count in r but not in the baseline, which was only scored, not annotated.
    """
    if rollouts.baseline is None:
        raise InputError(
            "greedy_baseline needs a greedy rollout of every prompt, and no sample has one.",
            where="algorithm.advantage",
            fix="Use the algorithm remax, or build the rollout with greedy_baseline=True.",
        )
    return _per_token(rollouts, *_of_rows(rollouts, rollouts.totals - rollouts.baseline.double()))


def optimal_baseline(rollouts: Rollouts, options: AdvantageOptions) -> Tensor:
    """A_i = r_i - b, b = sum_j L_j r_j / sum_j L_j over the group, L = trained tokens of the
    episode (OPO, 2505.23585).

    The baseline of least variance if gradients of tokens are orthogonal and of one size. Exactly 0
    in a group without signal.
    """
    e = ScoredEpisodes.of(rollouts)
    m = e.moments(options.std)
    # from the least reward of the group: large rewards lose nothing
    offset_E = e.value - m.low[e.group]
    baseline = e.sums(e.length * offset_E) / e.sums(e.length).clamp(min=1)
    return _per_token(
        rollouts, e, torch.where(m.signal[e.group], offset_E - baseline[e.group], 0.0)
    )


def maxrl(rollouts: Rollouts, options: AdvantageOptions) -> Tensor:
    """A = (r - mean_G) / (p_G + eps), p_G = the group's mean reward: for rewards of 0 and 1 its
    success rate (MaxRL, 2602.02710).

    grad log p = grad p / p, so this climbs the log-likelihood of a success, where grpo divides by
    sqrt(p(1-p)): rare successes count most, n_G - 1 for a single one. p_G is that of the plain
    rewards, without token rewards. They must not be negative.
    """
    e = ScoredEpisodes.of(rollouts)
    plain = ScoredEpisodes.of(rollouts, rollouts.rewards)
    if bool((plain.value < 0).any()):
        raise InputError(
            f"maxrl divides by the mean reward, and there is a reward of {plain.value.min():g}.",
            where="algorithm.advantage",
            fix="Give rewards of at least 0 (1 = success), without a length penalty.",
        )
    success = plain.moments(options.std).mean[e.group]
    return _per_token(
        rollouts, e, torch.where(success > 0, _centred(e) / (success + options.eps), 0.0)
    )


def pass_at_k(rollouts: Rollouts, options: AdvantageOptions) -> Tensor:
    """A_i = mean over the sets S of k samples of the group that hold i, of max(S) - max(S without
    i) (2503.19595).

    For rewards of 0 and 1: the chance that i makes pass@k succeed where the k - 1 others fail. The
    leave-one-out gradient estimator of E[max of k], averaged over all subsets (2505.15201), up to
    its constant k. Never negative; 0 in a group without signal. With rewards of the group in
    ascending order x_0 <= x_1 <= ... it is

        A_i = sum_{j < i} w_j (x_i - x_j)
        w_j = C(j, k-2) / C(n_G - 1, k-1) = P(x_j is the best of k - 1 others)

    k = 1 is the leave-one-out baseline; a group with fewer than k scored samples takes all it has.
    """
    assert options.k >= 1
    if options.k == 1:
        return leave_one_out(rollouts, replace(options, whiten=False))
    e = ScoredEpisodes.of(rollouts)
    advantage_E = torch.zeros_like(e.value)
    # in each group still sorted by reward
    for members in e.group.argsort(stable=True).split(torch.bincount(e.group).tolist()):
        n = len(members)
        if n >= 2:
            k = min(options.k, n)
            x = e.value[members]
            weights = torch.tensor(
                [math.comb(j, k - 2) / math.comb(n - 1, k - 1) for j in range(n)],
                dtype=torch.float64,
            )
            advantage_E[members] = (x[:, None] - x[None]).clamp(min=0) @ weights
    return _per_token(rollouts, e, advantage_E)


def decoupled(rollouts: Rollouts, options: AdvantageOptions) -> Tensor:
    """A = s / (std(s) + eps), s = sum over reward components c of w_c (r_c - mean_G(r_c)) /
    (std_G(r_c) + eps) (GDPO, 2601.05242).

    A component of small spread is not drowned by one of large spread. A component that is None for
    a sample says nothing about it and is left out of that component's group statistics. std(s) is
    over the scored episodes of the batch, whose mean of s is 0 by construction; `whiten: false`
    leaves s. Exactly 0 in a group where no component differs.
    """
    if rollouts.token_rewards is not None:
        raise InputError(
            "decoupled normalises each reward component, and token rewards (KL in the reward) are"
            " none.",
            where="algorithm.advantage",
            fix="Put the KL into the loss, or use another advantage.",
        )
    sum_S = torch.zeros(rollouts.rewards.shape, dtype=torch.float64)
    for name, value_S in sorted(rollouts.components.items() or [("", rollouts.rewards)]):
        e = ScoredEpisodes.of(rollouts, value_S, f"rewards {name}")
        scaled_E = _centred(e) / (e.moments(options.std).var.sqrt()[e.group] + options.eps)
        sum_S = sum_S + options.weights.get(name, 1.0) * e.spread(scaled_E)
    batch, value_E = _of_rows(rollouts, sum_S)
    if options.whiten is not False:
        value_E = value_E / (batch.pooled().moments(options.std).var.sqrt() + options.eps)
    return _per_token(rollouts, batch, value_E)


def gpg(rollouts: Rollouts, options: AdvantageOptions) -> Tensor:
    """A = (r - mean_G) * groups / groups with signal (GPG, 2504.02546): groups without signal no
    longer shrink the mean gradient. Groups of which nothing is scored are not counted. Exactly 0 in
    a group without signal.
    """
    e = ScoredEpisodes.of(rollouts)
    m = e.moments(options.std)
    return _per_token(
        rollouts, e, _centred(e) * (m.n > 0).sum().double() / m.signal.sum().clamp(min=1)
    )


def _centred(e: ScoredEpisodes) -> Tensor:
    """[E] r - mean_G, exactly 0 in groups without signal."""
    m = e.moments("population")
    return torch.where(m.signal[e.group], e.value - m.mean[e.group], 0.0)


def _of_rows(rollouts: Rollouts, values_S: Tensor) -> tuple[ScoredEpisodes, Tensor]:
    """Values that are advantages already, of scored rows."""
    e = ScoredEpisodes.of(rollouts, torch.where(rollouts.rewards.isnan(), torch.nan, values_S))
    return e, e.value


def _per_token(rollouts: Rollouts, e: ScoredEpisodes, advantage_E: Tensor) -> Tensor:
    return e.spread(advantage_E).to(rollouts.rewards.dtype)[rollouts.sequence]


def _whitened(rollouts: Rollouts, values_M: Tensor, options: AdvantageOptions) -> Tensor:
    scored_M = ~rollouts.rewards.isnan()[rollouts.sequence]
    return whiten(values_M.double(), scored_M, options).to(rollouts.rewards.dtype)


ADVANTAGES: dict[str, Advantage] = {
    f.__name__: f
    for f in (
        group_relative,
        batch_baseline,
        leave_one_out,
        return_to_go,
        group_whitened,
        greedy_baseline,
        optimal_baseline,
        maxrl,
        pass_at_k,
        decoupled,
        gpg,
        gae,
    )
}
