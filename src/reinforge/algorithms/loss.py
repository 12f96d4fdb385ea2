"""Losses as a backend calls them: the parts of an algorithm put together over one micro-batch.

loss = sum_t weight_t * (w_t * surrogate_t + beta * w_t * rho_t * kl_t - alpha * entropy_t), weight from the reducer, w from the
correction. Every term is a sum over tokens with weights fixed by the whole batch, so micro-batches add up to it exactly.

Legend: M trained tokens of the micro-batch.
"""

from __future__ import annotations

from torch import Tensor

from reinforge.algorithms.corrections import Correction, mismatch, none
from reinforge.algorithms.kl import KL, k3
from reinforge.algorithms.reduce import Reduce, token_mean
from reinforge.algorithms.surrogates import Surrogate, safe_ratio
from reinforge.core.backend import TrainedTokens
from reinforge.core.batch import Totals


class PolicyLoss:
    """A policy-gradient loss.

    `old` is the stream of that name if there is one, else the current log-probs without gradient: with a single update per
    rollout both are equal and no extra pass is needed. `off_policy` says that several updates follow, and asks for the pass.
    The KL term is weighted by rho = exp(logp - old) (no gradient), without which it is biased once the policy has moved;
    `kl_importance=False` leaves that out.
    """

    unit = 1
    entropy = True  # for the metrics

    def __init__(
        self, surrogate: Surrogate, reduce: Reduce, *, correction: Correction = none, kl: KL = k3, kl_coefficient: float = 0.0,
        kl_importance: bool = True, entropy_coefficient: float = 0.0, off_policy: bool = False,
    ):  # fmt: skip
        self.surrogate, self.reduce, self.correction, self.kl = surrogate, reduce, correction, kl
        self.kl_coefficient, self.kl_importance, self.entropy_coefficient = kl_coefficient, kl_importance, entropy_coefficient
        self.entropy_gradient = entropy_coefficient > 0
        self.needs = frozenset({"old"} if off_policy else ()) | frozenset({"reference"} if kl_coefficient > 0 else ())

    def __call__(self, tokens: TrainedTokens, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs, streams = tokens.logprobs, tokens.streams
        if not len(logprobs):
            return logprobs.sum(), {"policy/loss": logprobs.detach().sum()}
        old = streams.get("old", logprobs.detach())
        parts, metrics = self.surrogate(logprobs, old, streams["advantages"], tokens.sequence)
        assert parts.shape == logprobs.shape, f"a surrogate must give one loss per token, not {tuple(parts.shape)}"
        averages = {f"policy/{name}": value for name, value in metrics.items()}
        importance = safe_ratio(logprobs.detach(), old)
        if "behaviour" in streams:
            weights, metrics = self.correction(old, streams["behaviour"])
            averages |= {f"mismatch/{name}": value for name, value in metrics.items()}
            parts, importance = weights * parts, weights * importance
        if self.kl_coefficient > 0:
            kl = self.kl(logprobs, streams["reference"])
            averages["policy/kl"] = kl
            parts = parts + self.kl_coefficient * (importance * kl if self.kl_importance else kl)
        if tokens.entropy is not None:
            averages["policy/entropy"] = tokens.entropy
            if self.entropy_gradient:
                parts = parts - self.entropy_coefficient * tokens.entropy
        loss = (self.reduce(tokens, totals) * parts).sum()

        done = {name: value.detach().sum() / totals.tokens for name, value in averages.items()}
        done["policy/loss"] = loss.detach()
        if "policy/ratio" in averages:
            done["policy/ratio/max"] = averages["policy/ratio"].detach().max()
        if "behaviour" in streams:
            done |= mismatch(old, streams["behaviour"], totals.tokens)
        return loss, done


class NLLLoss:
    """Supervised fine-tuning: L = -logp of each trained token, by default averaged over all trained tokens of the batch."""

    unit = 1
    entropy = False
    entropy_gradient = False

    def __init__(self, reduce: Reduce = token_mean):
        self.reduce = reduce
        self.needs: frozenset[str] = frozenset()

    def __call__(self, tokens: TrainedTokens, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        loss = -(self.reduce(tokens, totals) * tokens.logprobs).sum()
        return loss, {"sft/loss": loss.detach(), "sft/nll": -tokens.logprobs.detach().sum() / max(totals.tokens, 1)}
