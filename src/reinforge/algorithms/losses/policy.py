"""The loss of a policy gradient: its parts put together over one micro-batch.

loss = sum_t weight_t * (w_t * s_t + beta * w_t * rho_t * kl_t - alpha * entropy_t - mu * positive_t
* logp_t): weight from the reducer, w from the correction, s the surrogate after the selection.
Every term is a sum over tokens with weights fixed by the whole batch, so micro-batches add up to it
exactly.

Legend: M trained tokens of the micro-batch.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from reinforge.algorithms.parts.corrections import Correction, mismatch, none
from reinforge.algorithms.parts.kl import KL, k3
from reinforge.algorithms.parts.reduce import Reduce
from reinforge.algorithms.parts.surrogates import Surrogate, safe_ratio
from reinforge.algorithms.parts.terms import LossTerms
from reinforge.core.backend import Loss, TrainedTokens, by_domain
from reinforge.core.batch import Totals
from reinforge.core.metrics import Extreme, LossMetrics
from reinforge.core.trace import traced

Selected = Literal["keep", "drop", "penalise"]


class PolicyLoss(Loss):
    """A policy-gradient loss.

    `old` is the stream of that name if there is one, else the current log-probs without gradient:
    with a single update per rollout both are equal and no extra pass is needed. `off_policy` says
    that several updates follow, and asks for the pass. `engine_old` takes the engine's log-probs
    (the stream `behaviour`) for old: the ratio then also holds the mismatch of engine and trainer,
    and there is nothing left to correct.

    The stream `selected` (1 or 0 per token), if there, changes the surrogate, and neither the
    denominators nor the other terms: `keep`: only selected tokens have one; `drop`: selected tokens
    have none; `penalise`: selected tokens get `penalty` * |logp - old| more.

    The KL term is weighted by rho = exp(logp - old) (no gradient), without which it is biased once
    the policy has moved; `kl_importance=False` leaves that out. `kl_in_reward`: the advantages have
    it already, so it is no term here.
    """

    entropy = True  # for the metrics

    def __init__(
        self,
        surrogate: Surrogate,
        reduce: Reduce,
        *,
        correction: Correction = none,
        kl: KL = k3,
        kl_importance: bool = True,
        kl_in_reward: bool = False,
        off_policy: bool = False,
        engine_old: bool = False,
        selected: Selected = "keep",
        penalty: float = 1.0,
        terms: LossTerms | None = None,
    ):
        self.surrogate = surrogate
        self.reduce = reduce
        self.correction = correction
        self.kl = kl
        self.terms = terms or LossTerms()
        self.kl_importance = kl_importance
        self.kl_in_loss = self.terms.kl > 0 and not kl_in_reward
        self.entropy_gradient = self.terms.bonus
        self.engine_old = engine_old
        self.selected = selected
        self.penalty = penalty
        self.needs = frozenset({"old"} if off_policy else ()) | frozenset(
            {"reference"} if self.kl_in_loss else ()
        )

    @property
    def idle(self) -> bool:
        """Whether a token with advantage 0 has no gradient, so that rows of such tokens need not be
        computed. A surrogate of a user's may do anything, so it is not asked.
        """
        function = getattr(self.surrogate, "func", self.surrogate)
        module = getattr(function, "__module__", None) or ""  # of text that was executed: None
        return (
            module.startswith("reinforge.")
            and not self.kl_in_loss
            and not self.entropy_gradient
            and not self.terms.nll
            and self.selected != "penalise"
        )

    def __call__(self, tokens: TrainedTokens, totals: Totals) -> tuple[Tensor, LossMetrics]:
        logprobs = tokens.logprobs
        streams = tokens.streams
        if not len(logprobs):
            return logprobs.sum(), {"policy/loss": logprobs.detach().sum()}
        now = logprobs.detach()
        old = streams["behaviour"] if self.engine_old else streams.get("old", now)
        parts, metrics = self.surrogate(logprobs, old, streams["advantages"], tokens.sequence)
        assert parts.shape == logprobs.shape, (
            f"a surrogate must give one loss per token, not {tuple(parts.shape)}"
        )
        averages = {f"policy/{name}": value for name, value in metrics.items()}
        if "selected" in streams:
            averages["policy/selected"] = streams["selected"]
            parts = self._select(parts, streams["selected"] > 0, (logprobs - old).abs())
        importance = safe_ratio(now, old)
        if "behaviour" in streams and not self.engine_old:
            weights, metrics = self.correction(old, streams["behaviour"], tokens.sequence)
            averages |= {f"mismatch/{name}": value for name, value in metrics.items()}
            parts = weights * parts
            importance = weights * importance
        parts = parts + self._terms(tokens, importance, averages)
        share = self.reduce(tokens, totals)
        weighted = share * parts
        loss = weighted.sum()

        done: LossMetrics = {
            name: value.detach().sum() / totals.seen for name, value in averages.items()
        }
        done["policy/loss"] = loss.detach()
        if "policy/ratio" in averages:
            done["policy/ratio/max"] = Extreme.largest(averages["policy/ratio"].detach().max())
        if "teacher" in streams:
            kl = averages["policy/teacher_kl"]
            done |= by_domain("policy/teacher_kl", kl, tokens, totals, self.domains)
        if "behaviour" in streams:
            done |= mismatch(now if self.engine_old else old, streams["behaviour"], totals.seen)
        shown = {"logprob": now, "weight": share, "loss": weighted}
        for name in ("ratio", "clip_fraction", "kl", "entropy"):
            if f"policy/{name}" in averages:
                shown[name] = averages[f"policy/{name}"]
        return loss, done | traced(tokens, totals, shown)

    def _select(self, parts: Tensor, selected: Tensor, distance: Tensor) -> Tensor:
        if self.selected == "penalise":
            return parts + torch.where(selected, self.penalty * distance, 0.0)
        return torch.where(selected if self.selected == "keep" else ~selected, parts, 0.0)

    def _terms(
        self, tokens: TrainedTokens, importance: Tensor, averages: dict[str, Tensor]
    ) -> Tensor:
        """[M]: what is added to the surrogate. Values worth a metric go into `averages`."""
        logprobs = tokens.logprobs
        streams = tokens.streams
        extra = torch.zeros_like(logprobs)
        if self.kl_in_loss:
            kl = self.kl(logprobs, streams["reference"])
            averages["policy/kl"] = kl
            extra = extra + self.terms.kl * (importance * kl if self.kl_importance else kl)
        if tokens.entropy is not None:
            averages["policy/entropy"] = tokens.entropy
            if self.entropy_gradient:
                extra = extra - self.terms.entropy * tokens.entropy
        if "teacher" in streams:
            averages["policy/teacher_kl"] = logprobs - streams["teacher"]
        if "positive" in streams:
            averages["policy/nll"] = -streams["positive"] * logprobs
            extra = extra + self.terms.nll * averages["policy/nll"]
        return extra


def positive_weights(rewards: Tensor, sequence: Tensor) -> Tensor:
    """[M]: N / N+ at tokens of rows with positive reward and 0 at the others, N trained tokens of
    the batch and N+ of such rows.

    With weights 1 / N the term is the mean NLL over the tokens of positive rows (VAPO, 2504.05118).
    """
    positive = (rewards > 0)[sequence].double()  # nan (unscored) is not
    return positive * (len(positive) / positive.sum().clamp(min=1))
