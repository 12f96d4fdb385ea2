"""Terms of preference methods whose pairs the policy itself samples.

Online DPO and self-play (SPIN) need none: they are DPO.

Legend: P pairs, S sequences, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reinforge.algorithms.preference_losses import Result, sigmoid
from reinforge.algorithms.rows import constant, sums
from reinforge.core.backend import TrainedTokens
from reinforge.core.batch import Totals
from reinforge.core.trace import traced


def xpo(
    policy_w: Tensor,
    policy_l: Tensor,
    reference_w: Tensor,
    reference_l: Tensor,
    *,
    explore: Tensor,
    beta: float = 0.1,
    alpha: float = 1e-5,
    label_smoothing: float = 0.0,
) -> Result:
    """DPO + alpha · log pi(y) of the answers y that the *reference* sampled, on pairs of one answer
    of either (2405.21046 algorithm 1).

    `explore` [P] is that log-prob, of whichever side it was: where it falls the policy explores.
    """
    loss, metrics = sigmoid(
        policy_w, policy_l, reference_w, reference_l, beta=beta, label_smoothing=label_smoothing
    )
    return loss + alpha * explore, metrics


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


class NashLoss:
    """Nash-MD as a backend calls it: the mean over the policy's answers.

    Streams: `reference`, and `wins`, constant over an answer.
    """

    unit = 1
    entropy = False
    entropy_gradient = False

    def __init__(self, *, beta: float = 0.1):
        self.beta = beta
        self.needs = frozenset({"reference"})

    def __call__(self, tokens: TrainedTokens, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
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
