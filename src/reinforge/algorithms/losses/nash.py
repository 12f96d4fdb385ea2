"""Nash-MD: answers of the policy against those of a mixture of it and the reference.

Legend: S sequences, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reinforge.algorithms.losses.rows import constant, sums
from reinforge.core.backend import Loss, TrainedTokens
from reinforge.core.batch import Totals
from reinforge.core.metrics import LossMetrics
from reinforge.core.trace import traced


def nash_md(
    policy: Tensor, reference: Tensor, wins: Tensor, *, beta: float = 0.1
) -> tuple[Tensor, dict[str, Tensor]]:
    """[S] -sg(P - 1/2 - beta (log pi - log mu)) log pi for answers of the policy (Nash-MD,
    2312.00886).

    `wins` [S] is the probability that the policy's answer beats one of the mixture of policy and
    reference (`geometric_mixture`). The expected gradient is that of -P + beta KL(pi || mu); 1/2 is
    a baseline.
    """
    assert policy.shape == reference.shape == wins.shape and policy.ndim == 1
    kl = (policy - reference).detach()
    return -(wins.to(policy.dtype) - 0.5 - beta * kl) * policy, {
        "kl": kl,
        "wins": wins.to(policy.dtype),
    }


def geometric_mixture(policy: Tensor, reference: Tensor, *, coefficient: float = 0.5) -> Tensor:
    """[..., V] normalised log-probs of pi^(1-c) mu^c from two tensors of logits: the opponent that
    Nash-MD samples from.
    """
    assert policy.shape == reference.shape
    return torch.log_softmax(
        (1 - coefficient) * policy.log_softmax(-1) + coefficient * reference.log_softmax(-1), -1
    )


class NashLoss(Loss):
    """Nash-MD as a backend calls it: the mean over the policy's answers.

    Streams: `reference`, and `wins`, constant over an answer.
    """

    def __init__(self, *, beta: float = 0.1):
        self.beta = beta
        self.needs = frozenset({"reference"})

    def __call__(self, tokens: TrainedTokens, totals: Totals) -> tuple[Tensor, LossMetrics]:
        rows = len(tokens.lengths)
        policy = sums(tokens.logprobs, tokens.sequence, rows)
        reference = sums(tokens.streams["reference"].to(policy.dtype), tokens.sequence, rows)
        parts, watched = nash_md(
            policy, reference, constant(tokens.streams, "wins", tokens.lengths), beta=self.beta
        )
        loss = parts.sum() / max(1, totals.sequences)
        return loss, {
            "preference/loss": loss.detach(),
            **{f"nash/{k}": v.sum() / max(1, totals.sequences) for k, v in watched.items()},
            **traced(
                tokens,
                totals,
                {"logprob": tokens.logprobs},
                {"loss": parts / max(1, totals.sequences)},
            ),
        }
