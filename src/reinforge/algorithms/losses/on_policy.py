"""Distillation on what the student itself samples, as a policy gradient: the teacher's opinion of
each token is the advantage.

Legend: M trained tokens.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from reinforge.algorithms.losses.distillation import DistillationLoss, minillm_returns, opd_reward
from reinforge.algorithms.parts.rollouts import AdvantageOptions, Rollouts
from reinforge.core.backend import Loss, TrainedTokens
from reinforge.core.batch import DOMAIN, Totals
from reinforge.core.metrics import LossMetrics, tensor_of
from reinforge.core.trace import LOSS


def _students(rollouts: Rollouts) -> Tensor:
    """The log-probs of the student that sampled, or of the trainer where it computed them again."""
    streams = rollouts.streams
    return streams["old"] if "old" in streams else streams["behaviour"]


def teacher_ratio(
    rollouts: Rollouts,
    options: AdvantageOptions,
    *,
    bound: float | None = None,
    centre: bool = True,
) -> Tensor:
    """A_t = log p(y_t) - log q(y_t), p the teacher: its expectation is -KL(q, p) of the step, so
    the policy gradient lowers it.

    Only the token itself counts, not what comes after it (on-policy distillation; `bound` cuts
    |A|). `minillm` has the rest. `centre` takes off the mean over the batch, or over the tokens of
    the same domain where domains have teachers of their own: a baseline, which changes the noise
    and not the expectation.
    """
    values = opd_reward(_students(rollouts), rollouts.streams["teacher"], clip=bound)
    return _centred(values, rollouts) if centre else values


def teacher_returns(
    rollouts: Rollouts, options: AdvantageOptions, *, normalise: bool = True, centre: bool = True
) -> Tensor:
    """A_t = R_{t+1}, the mean (or, not normalised, the sum) of log p - log q over later tokens:
    MiniLLM's long term (2306.08543).
    """
    values = minillm_returns(
        _students(rollouts), rollouts.streams["teacher"], rollouts.sequence, normalise=normalise
    )
    return _centred(values, rollouts) if centre else values


def _centred(values: Tensor, rollouts: Rollouts) -> Tensor:
    """Every domain by itself: what another teacher thinks of other rows is nothing to these."""
    if not len(values):
        return values
    if DOMAIN not in rollouts.streams:
        return values - values.mean()
    centred = values.clone()
    for domain in rollouts.streams[DOMAIN].unique():
        own = rollouts.streams[DOMAIN] == domain
        centred[own] -= values[own].mean()
    return centred


ADVANTAGES: dict[str, Any] = {"teacher_ratio": teacher_ratio, "teacher_returns": teacher_returns}
for _function in ADVANTAGES.values():
    _function.needs = frozenset({"teacher"})


class PolicyAndDistillationLoss(Loss):
    """L = L_policy + L_distillation over the same tokens: MiniLLM's long term and its single-step
    term, which is exact. That has a gradient where advantages are 0 too.
    """

    def __init__(self, policy: Loss, distillation: DistillationLoss):
        self.policy = policy
        self.distillation = distillation
        self.unit = policy.unit
        self.entropy = policy.entropy
        self.entropy_gradient = policy.entropy_gradient
        self.needs = policy.needs | distillation.needs
        self.divergence = distillation.divergence
        self.given = distillation.given
        self.by_rank = distillation.by_rank

    def name_domains(self, names: tuple[str, ...]) -> None:
        self.policy.name_domains(names)
        self.distillation.name_domains(names)

    def __call__(self, tokens: TrainedTokens, totals: Totals) -> tuple[Tensor, LossMetrics]:
        policy, metrics = self.policy(tokens, totals)
        divergence, more = self.distillation(tokens, totals)
        both = {**metrics, **more}
        if LOSS in both:
            both[LOSS] = tensor_of(metrics[LOSS]) + tensor_of(more[LOSS])
        return policy + divergence, both
