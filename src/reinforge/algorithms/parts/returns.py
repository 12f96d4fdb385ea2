"""Advantages that differ from token to token: returns-to-go and generalized advantage estimation.

Steps are the trained tokens of a row, in their order; what lies between them (tool output) is part
of the next state. The reward of a row comes with its last trained token, token rewards with their
own. Rows never see each other, in whatever order they are packed.

Legend: M trained tokens, S rows (samples). Token t of a row is drawn in state s_t; V_t = V(s_t).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reinforge.algorithms.parts.rollouts import AdvantageOptions, Rollouts
from reinforge.algorithms.parts.statistics import whiten
from reinforge.core.errors import InputError


def return_to_go(rollouts: Rollouts, options: AdvantageOptions) -> Tensor:
    """A_t = sum over i >= t of gamma^(i-t) r_i, whitened (REINFORCE++, 2501.03262): there KL to the
    reference is a token reward.

    Whitened over all trained tokens of scored rows of the batch, each counting once; `whiten:
    false` leaves the plain return.
    """
    rows = _Rows.of(rollouts)
    scored_M = ~rollouts.rewards.isnan()[rollouts.sequence]
    gamma_S = torch.full(rollouts.rewards.shape, options.gamma, dtype=torch.float64)
    return_M = torch.where(scored_M, rows.accumulate(rows.rewards(rollouts), gamma_S), 0.0)
    if options.whiten is not False:
        return_M = whiten(return_M, scored_M, options)
    return return_M.to(rollouts.rewards.dtype)


def gae(rollouts: Rollouts, options: AdvantageOptions) -> dict[str, Tensor]:
    """Generalized advantage estimation (1506.02438) from the stream `values`, V_t of a critic:

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t = sum over i >= t of (gamma lam)^(i-t) delta_i
        R_t = V_t + A_t

    V after the last token is `bootstrap` where the row was truncated and 0 where it ended by
    itself. `returns` R are the critic's targets, from `lam_critic` where it is given (VAPO,
    2504.05118: 1.0); they are never whitened. With `length_alpha` the advantages have lam = 1 -
    1/(alpha L), not below 0, L the trained tokens of the row (VAPO: alpha 0.05). Advantages are
    whitened over all trained tokens of scored rows, unless `whiten: false`. In an unscored row
    advantages are 0 and returns are the values: nothing to learn for either model.
    """
    if "values" not in rollouts.streams:
        raise InputError(
            "gae needs the values of a critic, and there are none.",
            where="algorithm.advantage",
            fix="Use an algorithm with a critic (ppo), or another advantage.",
        )
    rows = _Rows.of(rollouts)
    value_M = rollouts.streams["values"].double()
    assert value_M.shape == rollouts.sequence.shape
    scored_M = ~rollouts.rewards.isnan()[rollouts.sequence]
    delta_M = (
        rows.rewards(rollouts) + options.gamma * rows.following(value_M, _after(rollouts)) - value_M
    )

    lam_S = torch.full(rollouts.rewards.shape, options.lam, dtype=torch.float64)
    if options.length_alpha is not None:
        lam_S = (1 - 1 / (options.length_alpha * rows.lengths.clamp(min=1))).clamp(min=0)
    advantage_M = rows.accumulate(delta_M, options.gamma * lam_S)
    target_M = advantage_M
    if options.lam_critic is not None:
        target_M = rows.accumulate(
            delta_M, torch.full_like(lam_S, options.gamma * options.lam_critic)
        )
    advantage_M = torch.where(scored_M, advantage_M, 0.0)
    if options.whiten is not False:
        advantage_M = whiten(advantage_M, scored_M, options)
    dtype = rollouts.rewards.dtype
    return {
        "advantages": advantage_M.to(dtype),
        "returns": (value_M + torch.where(scored_M, target_M, 0.0)).to(dtype),
    }


def _after(rollouts: Rollouts) -> Tensor:
    """[S] V of the state after the last token."""
    if rollouts.bootstrap is None:
        return torch.zeros(rollouts.rewards.shape, dtype=torch.float64)
    after = rollouts.bootstrap.double()
    return after if rollouts.truncated is None else torch.where(rollouts.truncated, after, 0.0)


@dataclass(frozen=True)
class _Rows:
    """Where the tokens of each row are in a packed [M] vector.

    `order` puts them row by row; row s ends before `ends[s]` there.
    """

    order: Tensor  # [M]
    lengths: Tensor  # [S]
    ends: Tensor  # [S]

    @classmethod
    def of(cls, rollouts: Rollouts) -> _Rows:
        lengths = torch.bincount(rollouts.sequence, minlength=len(rollouts.rewards))
        assert torch.equal(lengths, rollouts.lengths), (
            "lengths are not those of the rows' trained tokens"
        )
        return cls(rollouts.sequence.argsort(stable=True), lengths, lengths.cumsum(0))

    def rewards(self, rollouts: Rollouts) -> Tensor:
        """[M] r_t: token rewards, and the row's reward with its last token (0 where it is
        unscored).
        """
        given = rollouts.token_rewards
        reward_M = (
            torch.zeros(len(self.order), dtype=torch.float64)
            if given is None
            else given.double().clone()
        )
        has = self.lengths > 0
        reward_M[self.order[self.ends[has] - 1]] += rollouts.rewards.double().nan_to_num(0.0)[has]
        return reward_M

    def following(self, values_M: Tensor, after_S: Tensor) -> Tensor:
        """[M] x_{t+1} of the same row, and after_S after its last token."""
        shifted = values_M[self.order].roll(-1)
        has = self.lengths > 0
        shifted[self.ends[has] - 1] = after_S[has]
        return torch.empty_like(shifted).index_put_((self.order,), shifted)

    def accumulate(self, values_M: Tensor, decay_S: Tensor) -> Tensor:
        """[M] y_t = x_t + decay y_{t+1} inside each row.

        All rows step back at once, longest first, so that those that have run out are at the end:
        500,000 tokens take a fraction of a second, and nothing is padded.
        """
        by_length = self.lengths.argsort(descending=True, stable=True)
        ends = self.ends[by_length]
        decay_S = decay_S[by_length]
        left = len(by_length) - torch.bincount(self.lengths).cumsum(0)  # [L]: rows longer than t
        x = values_M[self.order]
        y = torch.zeros(len(self.order), dtype=torch.float64)
        running = torch.zeros_like(decay_S)
        for t, n in enumerate(left.tolist()[:-1]):
            at = ends[:n] - (t + 1)
            running = torch.addcmul(x[at], decay_S[:n], running[:n])
            y[at] = running
        return torch.empty_like(y).index_put_((self.order,), y)
