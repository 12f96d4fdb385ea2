"""Surrogates: the loss of each trained token whose gradient improves the policy.

A surrogate is `fn(logprobs, old, advantages, sequence) -> (loss [M], metrics {name: [M]})`; settings are bound by `table.py`.
`old` and `advantages` carry no gradient; `sequence` says which tokens belong together, for ratios of whole sequences.

Legend: M trained tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Surrogate = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]

MAX_LOG_RATIO = 20.0  # exp(20) = 5e8 is far outside any trust region, and finite: inf * 0 cannot happen


def safe_ratio(logprobs: Tensor, other: Tensor) -> Tensor:
    """exp(logprobs - other), the exponent clamped to +-20. Beyond it the gradient is 0."""
    return (logprobs - other).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def ppo_clip(
    logprobs: Tensor, old: Tensor, advantages: Tensor, sequence: Tensor | None = None,
    *, low: float = 0.2, high: float = 0.2, dual: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """L = -min(rho A, clip(rho, 1 - low, 1 + high) A) with rho = exp(logp - logp_old) (PPO, 1707.06347 eq. 7).

    Dual clip (1912.09729), only where A < 0: L = min(L, -dual A), so a token that became much more likely cannot dominate.
    """
    assert logprobs.shape == old.shape == advantages.shape and logprobs.ndim == 1
    ratio = safe_ratio(logprobs, old)
    loss = torch.maximum(-ratio * advantages, -ratio.clamp(1 - low, 1 + high) * advantages)
    clipped_low = (advantages < 0) & (ratio < 1 - low)
    clipped_high = (advantages > 0) & (ratio > 1 + high)
    metrics = {"ratio": ratio, "clip_low": clipped_low, "clip_high": clipped_high, "clip_fraction": clipped_low | clipped_high}
    if dual is not None:
        bound = -dual * advantages
        clipped_dual = (advantages < 0) & (ratio > dual)
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
        metrics |= {"clip_dual": clipped_dual, "clip_fraction": metrics["clip_fraction"] | clipped_dual}
    return loss, {name: value.detach().to(loss.dtype) for name, value in metrics.items()}


def reinforce(logprobs: Tensor, old: Tensor, advantages: Tensor, sequence: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """L = -A logp (Williams 1992). No ratio enters the loss, so it is right for one update per rollout only."""
    assert logprobs.shape == old.shape == advantages.shape and logprobs.ndim == 1
    return -advantages * logprobs, {"ratio": safe_ratio(logprobs, old).detach()}
