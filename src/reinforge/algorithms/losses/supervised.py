"""Supervised fine-tuning: the plain likelihood, and one weighted by it."""

from __future__ import annotations

from torch import Tensor

from reinforge.algorithms.parts.reduce import Reduce, token_mean
from reinforge.core.backend import Loss, TrainedTokens
from reinforge.core.batch import Totals
from reinforge.core.metrics import LossMetrics
from reinforge.core.trace import traced


class NLLLoss(Loss):
    """Supervised fine-tuning: L = -logp of each trained token, by default averaged over all trained
    tokens of the batch.
    """

    def __init__(self, reduce: Reduce = token_mean):
        self.reduce = reduce

    def __call__(self, tokens: TrainedTokens, totals: Totals) -> tuple[Tensor, LossMetrics]:
        weights = self.reduce(tokens, totals)
        weighted = weights * tokens.logprobs
        loss = -weighted.sum()
        shown = {"logprob": tokens.logprobs, "weight": weights, "loss": -weighted}
        return loss, {
            "sft/loss": loss.detach(),
            "sft/nll": -tokens.logprobs.detach().sum() / max(totals.tokens, 1),
            **traced(tokens, totals, shown),
        }


class PretrainingLoss(Loss):
    """The ptx term of InstructGPT (2203.02155, equation 2): γ E[-log π(x)] over the tokens of
    pre-training text, where γ is the coefficient; added to whatever else is trained.
    """

    def __init__(self, coefficient: float):
        self.coefficient = coefficient

    def __call__(self, tokens: TrainedTokens, totals: Totals) -> tuple[Tensor, LossMetrics]:
        nll = -tokens.logprobs.sum() / max(totals.tokens, 1)
        return self.coefficient * nll, {"ptx/nll": nll.detach()}


def dft(logprobs: Tensor) -> Tensor:
    """[M] -sg(p) log p: the likelihood's gradient without the 1/p that blows it up on unlikely
    tokens (2508.05629).
    """
    return -logprobs.detach().exp() * logprobs


class DFTLoss(Loss):
    """Dynamic fine-tuning, by default averaged over all trained tokens of the batch."""

    def __init__(self, reduce: Reduce = token_mean):
        self.reduce = reduce

    def __call__(self, tokens: TrainedTokens, totals: Totals) -> tuple[Tensor, LossMetrics]:
        loss = (self.reduce(tokens, totals) * dft(tokens.logprobs)).sum()
        return loss, {
            "sft/loss": loss.detach(),
            "sft/nll": -tokens.logprobs.detach().sum() / max(totals.tokens, 1),
        }
