"""Reducers: how token losses become one number.

A reducer gives each token a weight, and the loss is sum(weight * token_loss). The weights come from
counts of the whole optimizer batch, so the gradient is the same however the batch is cut. N tokens
and n sequences (episodes) in the batch, L_s trained tokens in the token's episode, L_max the
configured limit:

| name          | weight        | a token of a long answer counts ...  |
|---------------|---------------|--------------------------------------|
| token_mean    | 1 / N         | as much as any other                 |
| sequence_mean | 1 / (L_s n)   | less than one of a short answer      |
| sequence_sum  | 1 / n         | as much as any other                 |
| fixed_length  | 1 / (L_max n) | as much as any other                 |

Legend: M trained tokens of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from reinforge.core.backend import TrainedTokens
from reinforge.core.batch import Totals

Reduce = Callable[[TrainedTokens, Totals], Tensor]


def token_mean(tokens: TrainedTokens, totals: Totals) -> Tensor:
    """1 / N (DAPO, 2503.14476)."""
    return torch.full_like(tokens.logprobs.detach(), 1 / max(totals.tokens, 1))


def sequence_mean(tokens: TrainedTokens, totals: Totals) -> Tensor:
    """1 / (L_s n): the mean over sequences of their token means (GRPO, 2402.03300)."""
    assert tokens.episode_tokens.shape == tokens.logprobs.shape
    return 1 / (tokens.episode_tokens.to(tokens.logprobs.dtype) * max(totals.sequences, 1))


def sequence_sum(tokens: TrainedTokens, totals: Totals) -> Tensor:
    """1 / n: the mean over sequences of their token sums."""
    return torch.full_like(tokens.logprobs.detach(), 1 / max(totals.sequences, 1))


def fixed_length(tokens: TrainedTokens, totals: Totals) -> Tensor:
    """1 / (L_max n): a constant, so that length does not matter (Dr. GRPO, 2503.20783)."""
    return torch.full_like(
        tokens.logprobs.detach(), 1 / (totals.max_length * max(totals.sequences, 1))
    )


REDUCERS: dict[str, Reduce] = {
    f.__name__: f for f in (token_mean, sequence_mean, sequence_sum, fixed_length)
}
