"""Every preference loss as a row, and the loss over pairs as a backend calls it.

Legend: M trained tokens of the micro-batch, S = 2P rows of it, P pairs (row 2i chosen, row 2i+1
rejected).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from reinforge.algorithms.losses import preference_free as free
from reinforge.algorithms.losses import preference_terms as terms
from reinforge.algorithms.losses.preference_terms import Result, result, smoothed
from reinforge.algorithms.losses.rows import constant, places, sides, sums
from reinforge.algorithms.settings import look_up, settings_of
from reinforge.core.backend import Loss, TrainedTokens
from reinforge.core.batch import Batch, Totals
from reinforge.core.errors import InputError
from reinforge.core.metrics import LossMetrics
from reinforge.core.sample import Sample
from reinforge.core.trace import traced

Norm = Literal["token", "sequence", "sum"]
GIVEN = {"nll", "gap", "explore"}  # tensors that the loss makes itself


@dataclass(frozen=True)
class PreferenceRow:
    """A loss over pairs: its function, and what `PairLoss` must hand it. A row of `PREFERENCE`; the
    name of the loss is its key.
    """

    function: Callable[..., Result]
    needs_reference: bool = True
    averaged: bool = False  # log-probs per token instead of per answer
    # a further tensor [P]: see `PairLoss._term`
    takes: Literal["nll", "gap", "explore"] | None = None
    nll: Norm = "token"  # over the chosen tokens of the batch, per answer and token, or per answer
    # pairs answers by rank in the whole batch: `PairLoss.prepare` must see it before it is cut.
    # gaps: the policy's gap of a pair with the reference's; answers: chosen ones with rejected ones
    ranked: Literal["gaps", "answers"] | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)


PREFERENCE: dict[str, PreferenceRow] = {
    "sigmoid": PreferenceRow(terms.sigmoid),
    "cdpo": PreferenceRow(terms.sigmoid, defaults={"label_smoothing": 0.1}),
    "sigmoid_norm": PreferenceRow(terms.sigmoid, averaged=True, defaults={"beta": 5.0}),
    "hinge": PreferenceRow(terms.hinge),
    "ipo": PreferenceRow(terms.ipo, averaged=True),
    "robust": PreferenceRow(terms.robust),
    "exo_pair": PreferenceRow(terms.exo_pair),
    "nca_pair": PreferenceRow(terms.nca_pair),
    "bco_pair": PreferenceRow(terms.bco_pair),
    "sppo_hard": PreferenceRow(terms.sppo_hard),
    "aot": PreferenceRow(terms.aot, ranked="gaps"),
    "aot_unpaired": PreferenceRow(terms.aot_unpaired, ranked="answers"),
    "apo_zero": PreferenceRow(terms.apo_zero),
    "apo_down": PreferenceRow(terms.apo_down),
    "discopop": PreferenceRow(terms.discopop),
    "rpo_sq": PreferenceRow(terms.rpo_sq, takes="gap"),
    "rpo_bwd_kl": PreferenceRow(terms.rpo_bwd_kl, takes="gap"),
    "rpo_fwd_kl": PreferenceRow(terms.rpo_fwd_kl, takes="gap"),
    "rpo": PreferenceRow(free.rpo, takes="nll", nll="sequence"),
    "sft": PreferenceRow(free.sft, needs_reference=False, takes="nll"),
    "cpo": PreferenceRow(free.cpo, needs_reference=False, takes="nll"),
    "orpo": PreferenceRow(free.orpo, needs_reference=False, averaged=True, takes="nll"),
    "simpo": PreferenceRow(free.simpo, needs_reference=False, averaged=True),
    "alphapo": PreferenceRow(free.alphapo, needs_reference=False, averaged=True),
    # of algorithms over sampled answers; online_dpo and spin are sigmoid under the names that
    # `algorithm.losses` knows them by
    "online_dpo": PreferenceRow(terms.sigmoid),
    "xpo": PreferenceRow(terms.xpo, takes="explore"),
    "spin": PreferenceRow(terms.sigmoid),
}


class PairLoss(Loss):
    """A preference loss, or a weighted sum of several (MPO): sum over terms of weight · mean over
    the pairs of the whole batch.

    >>> PairLoss("sigmoid", beta=0.1), PairLoss({"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0})

    A setting goes to every term that has one of that name. Streams, besides `reference`: `score`
    where a term compares given rewards (the same number on all tokens of an answer), `collision`
    for `wpo` (log sum_v pi(v)^2 of each token's distribution), `by_reference` for xpo (1 on answers
    that the reference sampled, else 0), `old` for terms that rank the batch.

    `wpo` weighs a pair by how likely the policy is to have written it: w = prod over both answers
    of exp(mean_t(log pi(y_t) - log sum_v pi(v)^2)), no gradient (2406.11827 eq. 2, "sampled
    alignment"). `ld_alpha` counts log-probs beyond the shorter answer's length only by this factor
    (LD-DPO, 2409.06411). `divergence` replaces the reverse KL in terms of the sigmoid kind:
    forward_kl, js, alpha (with `divergence_alpha`).

    Terms that rank (`aot`, `aot_unpaired`) need every pair of the batch at once. `prepare` ranks by
    the stream `old`, the policy's log-probs from before the update, and leaves each answer its
    partner as a stream; gradients flow through the current log-probs. With one update per batch
    both are of the same weights and the gradient is that of the uncut loss.
    """

    unit = 2

    def __init__(
        self,
        names: str | Mapping[str, float] = "sigmoid",
        *,
        wpo: bool = False,
        ld_alpha: float | None = None,
        divergence: str = "reverse_kl",
        divergence_alpha: float = 0.5,
        nll: Norm | None = None,
        **settings: Any,
    ):
        self.weights = {names: 1.0} if isinstance(names, str) else dict(names)
        self.rows = {name: look_up(PREFERENCE, name, "algorithm.name") for name in self.weights}
        self.wpo = wpo
        self.ld_alpha = ld_alpha
        self.nll = nll
        bend = look_up(terms.DIVERGENCES, divergence, "algorithm.options.divergence")
        if divergence != "reverse_kl":
            settings["divergence"] = (
                partial(bend, alpha=divergence_alpha) if divergence == "alpha" else bend
            )
        takes = {name: settings_of(row.function).keys() - GIVEN for name, row in self.rows.items()}
        for key in settings:
            if not any(key in parameters for parameters in takes.values()):
                raise InputError(
                    f"{', '.join(self.rows)} has no setting {key!r}.",
                    where="algorithm.options",
                    fix=f"There are: {', '.join(sorted(set().union(*takes.values())))}.",
                )
        self.settings = {
            name: {**row.defaults, **{k: v for k, v in settings.items() if k in takes[name]}}
            for name, row in self.rows.items()
        }
        self.ranked = [name for name, row in self.rows.items() if row.ranked]
        if self.ranked and wpo:
            raise InputError(
                f"{self.ranked[0]} pairs answers across the batch, so pairs have no weight of their"
                " own.",
                where="wpo",
                fix="Leave wpo out, or use a loss that keeps its pairs.",
            )
        reference = any(row.needs_reference for row in self.rows.values())
        self.needs = frozenset(
            n
            for n, on in (("reference", reference), ("old", self.ranked), ("collision", wpo))
            if on
        )

    def companions(self, samples: Sequence[Sample]) -> list[Sample]:
        return []

    def prepare(self, batches: Sequence[Batch], companions: Sequence[Batch] = ()) -> None:
        """Fills the streams `partner_<name>` of ranking terms, from `old` and `reference` of the
        whole optimizer batch.
        """
        if not self.ranked or not batches:
            return
        old, reference = (
            torch.cat(
                [
                    self._per_row(b.streams[name].double(), b.sequence, b.trained_lengths())
                    for b in batches
                ]
            )
            for name in ("old", "reference")
        )
        (old_w, old_l), (ref_w, ref_l) = sides(old), sides(reference)
        for name in self.ranked:
            if self.rows[name].ranked == "gaps":
                partner_w = partner_l = _by_rank(old_w - old_l, ref_w - ref_l)
            else:
                partner_w = _by_rank(old_w - ref_w, old_l - ref_l)
                partner_l = _by_rank(old_l - ref_l, old_w - ref_w)
            rows = torch.stack((partner_w, partner_l), 1).flatten().float()
            for batch, part in zip(
                batches, rows.split([len(b.samples) for b in batches]), strict=True
            ):
                batch.streams[f"partner_{name}"] = part[batch.sequence]

    def __call__(self, tokens: TrainedTokens, totals: Totals) -> tuple[Tensor, LossMetrics]:
        lengths = tokens.lengths.clamp(min=1)
        pairs = totals.samples / 2
        assert pairs > 0, "Totals.samples counts the rows of the batch: use Totals.of"
        policy = self._per_row(tokens.logprobs, tokens.sequence, tokens.lengths)
        reference = torch.zeros_like(policy)
        if "reference" in self.needs:
            reference = self._per_row(
                tokens.streams["reference"].to(policy.dtype), tokens.sequence, tokens.lengths
            )
        weight_P = self._wpo_weights(tokens) if self.wpo else None

        loss = policy.sum() * 0.0
        seen: dict[str, Tensor] = {}  # [S] each, for people
        metrics: LossMetrics = {}
        for name, row in self.rows.items():
            scale = 1 / lengths.to(policy.dtype) if row.averaged else torch.ones_like(policy)
            against = reference if row.needs_reference else torch.zeros_like(reference)
            part, watched = self._term(
                name, row, (*sides(policy * scale), *sides(against * scale)), tokens, totals
            )
            part = part if weight_P is None else weight_P * part
            term = part.sum() / pairs
            loss = loss + self.weights[name] * term
            if totals.traced:
                # each side is shown with half of its pair's loss
                half = self.weights[name] * part.detach().repeat_interleave(2) / (2 * pairs)
                seen["loss"] = seen.get("loss", 0.0) + half
                implicit = torch.stack((watched["chosen"], watched["rejected"]), 1).flatten()
                seen.setdefault("implicit_reward", implicit)  # that of the first term
            if len(self.rows) > 1:
                metrics[f"preference/{name}"] = term.detach()
            for key, value in watched.items():
                metrics.setdefault(f"rewards/{key}", value.sum() / pairs)  # those of the first term
        for side, value in zip(("chosen", "rejected"), sides(policy.detach()), strict=True):
            metrics[f"logps/{side}"] = value.sum() / pairs
        if weight_P is not None:
            metrics["preference/wpo_weight"] = weight_P.sum() / pairs
        shown = traced(tokens, totals, {"logprob": tokens.logprobs}, seen)
        return loss, {"preference/loss": loss.detach(), **metrics, **shown}

    def _term(
        self,
        name: str,
        row: PreferenceRow,
        numbers: tuple[Tensor, Tensor, Tensor, Tensor],
        tokens: TrainedTokens,
        totals: Totals,
    ) -> Result:
        settings = dict(self.settings[name])
        if row.takes == "nll":
            settings["nll"] = self._nll(tokens, totals, self.nll or row.nll)
        elif row.takes == "gap":
            chosen, rejected = sides(
                constant(tokens.streams, "score", tokens.lengths).to(numbers[0].dtype)
            )
            settings["gap"] = chosen - rejected
        elif row.takes == "explore":
            by_reference = constant(tokens.streams, "by_reference", tokens.lengths).to(
                numbers[0].dtype
            )
            w, l = sides(sums(tokens.logprobs, tokens.sequence, len(tokens.lengths)) * by_reference)
            settings["explore"] = w + l
        if not row.ranked:
            return row.function(*numbers, **settings)
        policy_w, policy_l, ref_w, ref_l = numbers
        beta = settings.get("beta", 0.1)
        smoothing = settings.get("label_smoothing", 0.0)
        partner_w, partner_l = sides(
            constant(tokens.streams, f"partner_{name}", tokens.lengths).to(policy_w.dtype)
        )
        a = policy_w - ref_w
        b = policy_l - ref_l
        if row.ranked == "gaps":
            return result(
                smoothed(beta * (policy_w - policy_l - partner_w), smoothing), beta * a, beta * b
            )
        # Both partners have a gradient, and each may be in another micro-batch: an answer gives its
        # own whole gradient and half the value
        halves = (
            smoothed(beta * (a - partner_w), smoothing),
            smoothed(beta * (partner_l - b), smoothing),
        )
        return result(
            halves[0] + halves[1] - (halves[0] + halves[1]).detach() / 2, beta * a, beta * b
        )

    def _per_row(self, logprobs: Tensor, sequence: Tensor, lengths: Tensor) -> Tensor:
        """[S] summed log-probs; with ld_alpha those beyond the length that both answers of a pair
        share count by that factor.
        """
        if self.ld_alpha is not None:
            shared = torch.minimum(*sides(lengths)).repeat_interleave(2)
            beyond = places(sequence, lengths) >= shared[sequence]
            logprobs = torch.where(beyond, self.ld_alpha * logprobs, logprobs)
        return sums(logprobs, sequence, len(lengths))

    def _nll(self, tokens: TrainedTokens, totals: Totals, norm: Norm) -> Tensor:
        """[P] whose sum over the batch, divided by its pairs, is the mean negative log-likelihood
        of the chosen answers.
        """
        nll = -sides(sums(tokens.logprobs, tokens.sequence, len(tokens.lengths)))[0]
        if norm == "token":
            return nll * (totals.samples / 2 / max(totals.chosen_tokens, 1))
        return nll if norm == "sum" else nll / sides(tokens.lengths)[0].clamp(min=1)

    def _wpo_weights(self, tokens: TrainedTokens) -> Tensor:
        aligned = tokens.logprobs.detach() - tokens.streams["collision"].to(tokens.logprobs.dtype)
        mean = sums(aligned, tokens.sequence, len(tokens.lengths)) / tokens.lengths.clamp(min=1)
        w, l = sides(mean)
        return torch.exp(w + l)


def _by_rank(mine: Tensor, others: Tensor) -> Tensor:
    """For each of mine the one of the others that has its rank."""
    partner = torch.empty_like(others)
    partner[mine.argsort(stable=True)] = others.sort(stable=True).values
    return partner
