"""Surrogates whose ratio belongs to a whole sequence. Contract and signs as in `surrogates.py`.

A sequence is a row: the tokens with one index in `sequence`. Each token carries a part of its
sequence's loss such that the reducer named in the docstring gives the paper's objective. l_t =
logp_t - old_t, L = tokens of the sequence.

| name          | ratio of the sequence              | clipped or gated by        | reducer       |
|---------------|------------------------------------|----------------------------|---------------|
| gspo          | exp(mean l)                        | clip of the ratio          | sequence_mean |
| gspo_token    | same value, gradient of each token | clip of the ratio          | sequence_mean |
| sequence_clip | exp(sum l)                         | clip of the ratio          | sequence_sum  |
| gmpo          | exp(mean of clipped l)             | clip of each l             | sequence_mean |
| vespo         | exp(sum l)                         | smooth weight, no gradient | sequence_sum  |

luspo (2602.05261) is gspo with the reducer sequence_sum: each sequence counts times its length.
An episode of several rows has a ratio for each row, and the reducers weigh rows by their tokens.

Legend: M trained tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reinforge.algorithms.parts.ratios import (
    choose,
    clip_loss,
    finished,
    log_ratio,
    per_sequence,
    sequence_log_ratio,
    straight_through,
)


def gspo(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    sequence: Tensor,
    *,
    low: float = 3e-4,
    high: float = 4e-4,
) -> tuple[Tensor, dict[str, Tensor]]:
    """L = -min(s A, clip(s, 1 - low, 1 + high) A), s = exp(mean_t l_t) (GSPO, 2507.18071 eq. 5 and
    7). Reducer: sequence_mean.

    Every token of a sequence has the sequence's loss; the gradient goes through the mean. The
    ranges are the paper's: at 0.2 a mean over many tokens practically never clips. TRL:
    importance_sampling_level="sequence".
    """
    _check(logprobs, old, advantages, sequence)
    loss, metrics = clip_loss(
        sequence_log_ratio(logprobs, old, sequence, mean=True).exp(), advantages, low, high
    )
    return loss, finished(metrics, loss.dtype)


def gspo_token(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    sequence: Tensor,
    *,
    low: float = 3e-4,
    high: float = 4e-4,
) -> tuple[Tensor, dict[str, Tensor]]:
    """As `gspo` with s_t = sg(s) pi_t / sg(pi_t) (2507.18071 eq. 13 and 14).

    Reducer: sequence_mean.

    The value is gspo's. The gradient of a token is that of its own log-prob, so advantages may
    differ within a sequence; where they do not, the gradient is gspo's too. This is what veRL calls
    gspo.
    """
    _check(logprobs, old, advantages, sequence)
    ratio = sequence_log_ratio(logprobs.detach(), old, sequence, mean=True).exp()
    loss, metrics = clip_loss(straight_through(ratio, logprobs), advantages, low, high)
    return loss, finished(metrics, loss.dtype)


def sequence_clip(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    sequence: Tensor,
    *,
    low: float = 0.2,
    high: float = 0.2,
) -> tuple[Tensor, dict[str, Tensor]]:
    """L = -min(R A, clip(R, 1 - low, 1 + high) A) / L, R = exp(sum_t l_t).

    Reducer: sequence_sum, which takes away the 1 / L.

    PPO with the whole answer as one action: what RLOO (2402.14740) becomes with several updates per
    rollout, and what TRL's RLOOTrainer does. On-policy it has the gradient of -A times the summed
    log-prob.
    """
    _check(logprobs, old, advantages, sequence)
    loss, metrics = clip_loss(
        sequence_log_ratio(logprobs, old, sequence).exp(), advantages, low, high
    )
    return loss / per_sequence(torch.ones_like(loss.detach()), sequence), finished(
        metrics, loss.dtype
    )


def gmpo(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    sequence: Tensor,
    *,
    low: float = 0.4,
    high: float = 0.4,
) -> tuple[Tensor, dict[str, Tensor]]:
    """L = -A exp(mean_t c_t), the geometric mean of clipped ratios (GMPO, 2507.20673).

    Reducer: sequence_mean.

        c_t = min(l_t, high) where A > 0, max(l_t, -low) where A < 0

    The range is of log-ratios: (e^-0.4, e^0.4) in the paper. A clipped token leaves the gradient of
    the others alone. TRL and veRL do the same.
    """
    _check(logprobs, old, advantages, sequence)
    logs = log_ratio(logprobs, old)
    clipped = torch.where(
        advantages > 0,
        logs.clamp(max=high),
        torch.where(advantages < 0, logs.clamp(min=-low), logs),
    )
    ratio = per_sequence(clipped, sequence, mean=True).exp()
    loss = -ratio * advantages
    clipped_low = (advantages < 0) & (logs < -low)
    clipped_high = (advantages > 0) & (logs > high)
    metrics = {
        "ratio": ratio,
        "clip_low": clipped_low,
        "clip_high": clipped_high,
        "clip_fraction": clipped_low | clipped_high,
    }
    return loss, finished(metrics, loss.dtype)


def vespo(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    sequence: Tensor,
    *,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """L = -sg(phi(w)) A logp, phi(w) = w^k exp(lambda (1 - w)), w = exp(sum_t l_t), k and lambda by
    the sign of A (VESPO, 2602.10693).

    phi(1) = 1, and it falls to 0 on both sides: sequences far off-policy fade out. w is not divided
    by the length, and neither is the log-prob: the reducer of the paper's objective is sequence_sum
    (sequence_mean divides each sequence by its length; the authors' code and TRL use token_mean). w
    is meant against the policy that sampled, so `old` should be the behaviour and no correction
    used besides; TRL multiplies its truncated correction into w.
    """
    _check(logprobs, old, advantages, sequence)
    log_w = sequence_log_ratio(logprobs.detach(), old, sequence)
    k = choose(advantages >= 0, k_positive, k_negative, log_w)
    decay = choose(advantages >= 0, lambda_positive, lambda_negative, log_w)
    phi = (k * log_w - decay * log_w.expm1()).exp()
    loss = -phi * advantages * logprobs
    return loss, finished({"ratio": log_w.exp(), "weight": phi}, loss.dtype)


def _check(logprobs: Tensor, old: Tensor, advantages: Tensor, sequence: Tensor) -> None:
    assert logprobs.shape == old.shape == advantages.shape == sequence.shape and logprobs.ndim == 1
