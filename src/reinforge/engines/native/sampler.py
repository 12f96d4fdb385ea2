"""Drawing tokens.

One uniform number per (sample seed, position) picks from the cumulative distribution.

A counter-based hash makes the number: it depends on nothing but what it is for, so a sample comes
out the same whichever batch it ran in and whatever was lost in between.

Legend: B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# splitmix64's constants as signed 64-bit integers
_STEP = -7046029254386353131
_MIX1 = -4658895280553007687
_MIX2 = -7723592293110705685


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch shifts signed integers arithmetically."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """[B] float64 in [0, 1): splitmix64 of (seed, position)."""
    x = seeds + (positions + 1) * _STEP
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    x = x ^ _shift(x, 31)
    return _shift(x, 11).double() * 2.0**-53


def keep_top(z: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor) -> Tensor:
    """Sets to −inf what the filters drop, row by row. top_k 0, top_p 1 and min_p 0 drop nothing.

    The order is that of transformers: top_p is a share of what top_k leaves, and min_p of the
    likeliest token, which all leave.
    """
    ordered, index = z.sort(-1, descending=True)
    rank = torch.arange(z.shape[-1], device=z.device)[None]
    drop = (top_k[:, None] > 0) & (rank >= top_k[:, None])
    p = ordered.masked_fill(drop, float("-inf")).softmax(-1)
    # the token that crosses top_p stays; float sums pass 1 early
    drop |= (top_p[:, None] < 1) & ((p.cumsum(-1) - p) >= top_p[:, None])
    drop |= p < min_p[:, None] * p[:, :1]
    drop[:, 0] = False
    return z.masked_fill(torch.zeros_like(drop).scatter_(1, index, drop), float("-inf"))


def draw(
    logits: Tensor,
    temperatures: Tensor,
    u: Tensor,
    filters: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Tokens [B] and their log-probs [B] from float32 logits [B, V].

    `filters` are top_p, top_k and min_p, [B] each. The log-prob is of softmax(logits / T) over the
    full vocabulary, before any filter; T = 0 is greedy and reports T = 1. Nothing here asks the
    host: a CUDA graph may hold it.
    """
    assert logits.ndim == 2 and logits.dtype == torch.float32
    greedy = temperatures == 0
    z = logits / torch.where(greedy, 1.0, temperatures)[:, None]
    lse = z.logsumexp(-1)
    kept = z if filters is None else keep_top(z, *filters)
    cdf = (kept - kept.amax(-1, keepdim=True)).exp_().cumsum(-1, dtype=torch.float64)
    picked = torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True)[:, 0].clamp_(
        max=z.shape[-1] - 1
    )
    picked = torch.where(greedy, z.argmax(-1), picked)
    return picked, z.gather(-1, picked[:, None])[:, 0] - lse
