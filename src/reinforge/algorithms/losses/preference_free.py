"""Preference losses with a likelihood term on the chosen answer, and those without a reference.

Same shape as `preference_losses`.

`nll` [P] is the negative log-likelihood of the chosen answers, scaled so that its mean over the
pairs of the batch is the term wanted.

Legend: P pairs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from reinforge.algorithms.losses.preference_terms import (
    Divergence,
    Result,
    result,
    reverse_kl,
    sigmoid,
    smoothed,
)


def sft(
    policy_w: Tensor,
    policy_l: Tensor,
    reference_w: Tensor,
    reference_l: Tensor,
    *,
    nll: Tensor,
    beta: float = 0.1,
) -> Result:
    """The likelihood of the chosen answer alone; a term of a mixture (MPO, 2411.10442)."""
    return result(nll, beta * (policy_w - reference_w), beta * (policy_l - reference_l))


def rpo(
    policy_w: Tensor,
    policy_l: Tensor,
    reference_w: Tensor,
    reference_l: Tensor,
    *,
    nll: Tensor,
    beta: float = 0.1,
    nll_weight: float = 1.0,
    label_smoothing: float = 0.0,
    divergence: Divergence = reverse_kl,
) -> Result:
    """DPO + nll_weight · NLL(w)/|w| (2404.19733, 2405.16436): the chosen answer must not lose
    likelihood.
    """
    loss, metrics = sigmoid(
        policy_w,
        policy_l,
        reference_w,
        reference_l,
        beta=beta,
        label_smoothing=label_smoothing,
        divergence=divergence,
    )
    return loss + nll_weight * nll, metrics


def cpo(
    policy_w: Tensor,
    policy_l: Tensor,
    reference_w: Tensor,
    reference_l: Tensor,
    *,
    nll: Tensor,
    beta: float = 0.1,
    nll_weight: float = 1.0,
    label_smoothing: float = 0.0,
) -> Result:
    """-log sigma(beta (log pi_w - log pi_l)) + nll_weight · NLL(w): DPO with a uniform reference
    (2401.08417).
    """
    w = beta * policy_w
    l = beta * policy_l
    return result(smoothed(w - l, label_smoothing) + nll_weight * nll, w, l)


def simpo(
    policy_w: Tensor,
    policy_l: Tensor,
    reference_w: Tensor,
    reference_l: Tensor,
    *,
    beta: float = 2.0,
    gamma: float = 1.0,
    label_smoothing: float = 0.0,
) -> Result:
    """-log sigma(beta (mean log pi_w - mean log pi_l) - gamma) (2405.14734)."""
    w = beta * policy_w
    l = beta * policy_l
    return result(smoothed(w - l - gamma, label_smoothing), w, l)


def alphapo(
    policy_w: Tensor,
    policy_l: Tensor,
    reference_w: Tensor,
    reference_l: Tensor,
    *,
    beta: float = 2.0,
    gamma: float = 1.0,
    alpha: float = 0.25,
    label_smoothing: float = 0.0,
) -> Result:
    """SimPO with the reward (1 - p^-alpha) / alpha, p = exp(mean log pi); alpha -> 0 is SimPO
    (2501.03884).
    """
    if alpha == 0:
        return simpo(
            policy_w,
            policy_l,
            reference_w,
            reference_l,
            beta=beta,
            gamma=gamma,
            label_smoothing=label_smoothing,
        )
    w, l = (
        beta * -torch.expm1((-alpha * logp).clamp(max=80.0)) / alpha
        for logp in (policy_w, policy_l)
    )
    return result(smoothed(w - l - gamma, label_smoothing), w, l)


def orpo(
    policy_w: Tensor,
    policy_l: Tensor,
    reference_w: Tensor,
    reference_l: Tensor,
    *,
    nll: Tensor,
    beta: float = 0.1,
    nll_weight: float = 1.0,
) -> Result:
    """NLL(w) - beta log sigma(log odds_w - log odds_l), odds = p / (1 - p), p = exp(mean log pi)
    (2403.07691).

    NLL over the answer, as in the paper; TRL's takes in the prompt.
    """
    odds = (policy_w - _log1mexp(policy_w)) - (policy_l - _log1mexp(policy_l))
    return result(nll_weight * nll + beta * smoothed(odds, 0.0), beta * policy_w, beta * policy_l)


def _log1mexp(logp: Tensor) -> Tensor:
    """log(1 - e^x) for x < 0 without cancellation: either form is exact on its side of -log 2.

    Certain answers (x = 0) are cut at -1e-6.
    """
    x = logp.clamp(max=-1e-6)
    near = x > -math.log(2)
    return torch.where(
        near, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(torch.where(near, -1.0, x)))
    )
