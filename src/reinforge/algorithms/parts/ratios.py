"""Ratios of two policies at the sampled tokens, and their sums over sequences: what surrogates and
corrections are made of.

Log-ratios are clamped to +-20 before anything is exponentiated, so nothing overflows and inf * 0
cannot happen.

Legend: M trained tokens. `sequence` [M] says which row a token belongs to; rows are never split
over micro-batches.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) = 5e8 is far outside any trust region, and finite


def log_ratio(logprobs: Tensor, other: Tensor) -> Tensor:
    """logprobs - other, clamped to +-20. Beyond it the gradient is 0."""
    return (logprobs - other).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def safe_ratio(logprobs: Tensor, other: Tensor) -> Tensor:
    """exp(logprobs - other), the exponent clamped to +-20."""
    return log_ratio(logprobs, other).exp()


def sequence_log_ratio(
    logprobs: Tensor, other: Tensor, sequence: Tensor, *, mean: bool = False
) -> Tensor:
    """[M]: for each token the sum (or mean) of its sequence's log-ratios, clamped to +-20."""
    return per_sequence(log_ratio(logprobs, other), sequence, mean=mean).clamp(
        -MAX_LOG_RATIO, MAX_LOG_RATIO
    )


def per_sequence(values: Tensor, sequence: Tensor, *, mean: bool = False) -> Tensor:
    """[M]: for each token the sum (or mean) of `values` over the tokens of its sequence.

    Added up in float64 by a sorted scatter, so the result does not depend on what else is in the
    pack, nor on the run.
    """
    assert values.shape == sequence.shape and values.ndim == 1
    rank = _rank(sequence)
    wide = values.double()
    total = torch.zeros_like(wide).index_put((rank,), wide, accumulate=True)
    if mean:
        count = torch.zeros_like(wide.detach()).index_put(
            (rank,), torch.ones_like(wide.detach()), accumulate=True
        )
        total = total / count.clamp(min=1)
    return total[rank].to(values.dtype)


def _rank(sequence: Tensor) -> Tensor:
    """[M] numbers from 0 without gaps, equal where `sequence` is: fits into M places without asking
    the device for a maximum.
    """
    ordered, order = sequence.sort(stable=True)
    new = torch.zeros_like(ordered)
    new[1:] = ordered[1:] != ordered[:-1]
    return torch.empty_like(ordered).scatter(0, order, new.cumsum(0))


def straight_through(weight: Tensor, logprobs: Tensor) -> Tensor:
    """`weight` in value, weight * d logprobs in gradient: sg(w) * pi / sg(pi)."""
    return weight.detach() * (1 + (logprobs - logprobs.detach()))


def choose(condition: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """One of two numbers for each token, in the precision of `like` (torch.where of two numbers is
    float32).
    """
    return torch.where(condition, like.new_full((), yes), like.new_full((), no))


def clip_loss(
    ratio: Tensor, advantages: Tensor, low: float, high: float, delta: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(ratio A, clip(ratio, 1 - low, 1 + high) A), the first ratio at most `delta` if that is
    given; and what was clipped.
    """
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    loss = torch.maximum(-bounded * advantages, -ratio.clamp(1 - low, 1 + high) * advantages)
    bound = 1 + high if delta is None else min(1 + high, delta)
    clipped_low = (advantages < 0) & (ratio < 1 - low)
    clipped_high = (advantages > 0) & (ratio > bound)
    metrics = {
        "ratio": ratio,
        "clip_low": clipped_low,
        "clip_high": clipped_high,
        "clip_fraction": clipped_low | clipped_high,
    }
    if delta is not None:
        clipped_delta = (advantages < 0) & (ratio > max(delta, 1 + high))
        metrics |= {
            "clip_delta": clipped_delta,
            "clip_fraction": metrics["clip_fraction"] | clipped_delta,
        }
    return loss, metrics


def finished(metrics: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Metrics as they leave a surrogate: numbers without gradient."""
    return {name: value.detach().to(dtype) for name, value in metrics.items()}
