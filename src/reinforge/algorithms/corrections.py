"""Corrections for the gap between the policy that sampled (behaviour) and the trainer's view of the same weights.

A correction is `fn(trainer, behaviour) -> (weights [M], metrics {name: [M]})` with w from rho = exp(trainer - behaviour),
where `trainer` is the old log-probs (without an old pass: the current ones, detached). Weights carry no gradient.

Legend: M trained tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from reinforge.algorithms.surrogates import safe_ratio

Correction = Callable[[Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]

QUANTILES = (0.01, 0.05, 0.5, 0.95, 0.99)


def none(trainer: Tensor, behaviour: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """w = 1."""
    return torch.ones_like(trainer), {}


def tis(trainer: Tensor, behaviour: Tensor, *, cap: float = 2.0) -> tuple[Tensor, dict[str, Tensor]]:
    """Truncated importance sampling per token: w = min(rho, cap)."""
    ratio = safe_ratio(trainer, behaviour)
    return ratio.clamp(max=cap), {"truncated": (ratio > cap).to(ratio.dtype)}


def mis(trainer: Tensor, behaviour: Tensor, *, cap: float = 2.0) -> tuple[Tensor, dict[str, Tensor]]:
    """Masked importance sampling per token: w = rho where rho <= cap, otherwise the token is dropped (w = 0)."""
    ratio = safe_ratio(trainer, behaviour)
    return torch.where(ratio <= cap, ratio, 0.0), {"dropped": (ratio > cap).to(ratio.dtype)}


def mismatch(trainer: Tensor, behaviour: Tensor, n_tokens: int) -> dict[str, Tensor]:
    """Statistics of rho for one micro-batch, as shares of `n_tokens` (the whole batch's), so that they add up.

    mean and max of |trainer - behaviour|, mean, mean square, min and max of rho, share of tokens with rho outside [1/2, 2].
    """
    delta = (trainer - behaviour).abs()
    ratio = safe_ratio(trainer, behaviour)
    return {
        "mismatch/mean": delta.sum() / n_tokens,
        "mismatch/max": delta.max(),
        "mismatch/ratio": ratio.sum() / n_tokens,
        "mismatch/ratio_squared": ratio.square().sum() / n_tokens,
        "mismatch/ratio/min": ratio.min(),
        "mismatch/ratio/max": ratio.max(),
        "mismatch/outside_2x": ((ratio > 2.0) | (ratio < 0.5)).to(ratio.dtype).sum() / n_tokens,
    }


def finish(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics summed over a whole batch, with the moments of rho turned into the effective sample size (as a share):

    ess = (sum rho)^2 / (n sum rho^2); 1 without mismatch, towards 0 when few tokens carry all the weight.
    """
    done = dict(metrics)
    square = done.pop("mismatch/ratio_squared", 0.0)
    if square > 0:
        done["mismatch/ess"] = done["mismatch/ratio"] ** 2 / square
    return done


def statistics(trainer: Tensor, behaviour: Tensor) -> dict[str, float]:
    """The same for whole vectors, with quantiles of rho (which do not add up over micro-batches). Empty for M = 0."""
    if not len(trainer):
        return {}
    summed = finish({name: float(value) for name, value in mismatch(trainer, behaviour, len(trainer)).items()})
    levels = torch.tensor(QUANTILES, dtype=torch.float64)
    values = _quantile(safe_ratio(trainer, behaviour).double().cpu(), levels)
    return summed | {f"mismatch/ratio/p{round(100 * q):02d}": float(v) for q, v in zip(QUANTILES, values, strict=True)}


def _quantile(values: Tensor, levels: Tensor) -> Tensor:
    """Linear interpolation between order statistics; `torch.quantile` refuses more than 16 million values."""
    ordered = values.sort().values
    place = levels * (len(values) - 1)
    below, above = place.floor().long(), place.ceil().long()
    return torch.lerp(ordered[below], ordered[above], place - below)
