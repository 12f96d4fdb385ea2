"""Preference losses for answers that were judged one by one: one number per answer, good
(desirable) or bad.

A loss is `fn(policy, reference, good, *, beta, ...) -> (loss [S], metrics {"reward": [S]})` with a
= log pi - log ref summed over the answer, r = beta a. A loss over a batch divides by the number of
its answers.

Legend: M trained tokens of the micro-batch, S answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from reinforge.algorithms.losses.rows import constant, sums
from reinforge.algorithms.settings import look_up, settings_of
from reinforge.core.backend import Loss, State, TrainedTokens
from reinforge.core.batch import Batch, Totals
from reinforge.core.errors import InputError
from reinforge.core.metrics import LossMetrics
from reinforge.core.sample import Sample

Result = tuple[Tensor, dict[str, Tensor]]
MISMATCHED = "/mismatched"  # ends the uid of a companion


def kto(
    policy: Tensor,
    reference: Tensor,
    good: Tensor,
    *,
    baseline: Tensor | float,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Result:
    """lambda (1 - sigma(+-(r - beta z))), + for good answers; z >= 0 is a KL of the policy to the
    reference (2402.01306).

    z is a constant of the whole batch without gradient: `kto_baseline` of mismatched prompts and
    answers.
    """
    ratio, sign, weight = _parts(policy, reference, good, desirable_weight, undesirable_weight)
    return weight * torch.sigmoid(-sign * beta * (ratio - baseline)), {
        "reward": (beta * ratio).detach()
    }


def bco(
    policy: Tensor,
    reference: Tensor,
    good: Tensor,
    *,
    delta: Tensor | float = 0.0,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Result:
    """-lambda log sigma(+-(r - delta)): a binary classifier; delta is the running mean of rewards
    (2404.04656).
    """
    ratio, sign, weight = _parts(policy, reference, good, desirable_weight, undesirable_weight)
    return -weight * logsigmoid(sign * (beta * ratio - delta)), {"reward": (beta * ratio).detach()}


def apo_zero_unpaired(
    policy: Tensor,
    reference: Tensor,
    good: Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Result:
    """lambda (1 - sigma(+-r)): the two halves of apo_zero (2408.06266 eq. 7), or kto without a
    baseline.
    """
    return kto(
        policy,
        reference,
        good,
        baseline=0.0,
        beta=beta,
        desirable_weight=desirable_weight,
        undesirable_weight=undesirable_weight,
    )


def kto_baseline(policy: Tensor, reference: Tensor) -> Tensor:
    """max(0, mean over mismatched rows of log pi - log ref), no gradient."""
    assert policy.shape == reference.shape and policy.ndim == 1 and len(policy)
    return (policy - reference).detach().mean().clamp(min=0)


def _parts(
    policy: Tensor, reference: Tensor, good: Tensor, desirable: float, undesirable: float
) -> tuple[Tensor, Tensor, Tensor]:
    assert policy.shape == reference.shape == good.shape and policy.ndim == 1
    yes = good.bool()
    one = torch.ones_like(policy)
    return (
        policy - reference,
        torch.where(yes, one, -one),
        torch.where(yes, desirable * one, undesirable * one),
    )


@dataclass(frozen=True)
class UnpairedRow:
    """A loss over answers that were judged one by one. A row of `UNPAIRED`; `UnpairedLoss` calls
    it.
    """

    function: Callable[..., Result]
    constant: str | None = None  # the batch-wide constant it takes by this name


UNPAIRED: dict[str, UnpairedRow] = {
    "kto": UnpairedRow(kto, "baseline"),
    "bco": UnpairedRow(bco, "delta"),
    "apo_zero_unpaired": UnpairedRow(apo_zero_unpaired),
}


class UnpairedLoss(Loss):
    """A loss over single judged answers.

    The stream `label` holds 1 on all tokens of a good answer and 0 on those of a bad one
    (`rows.with_stream`).

    Constants of the whole batch are made by `prepare` from `old` log-probs (the policy's before the
    update, so the current ones with one update per batch) and reach micro-batches as the stream
    `constant`: a KTO baseline from `companions`, prompts with another prompt's answer; BCO's delta
    from the rewards of all batches so far, this one included. That mean is state, and saved.
    """

    def __init__(self, name: str = "kto", *, limit: int | None = None, **settings: Any):
        self.row: UnpairedRow = look_up(UNPAIRED, name, "algorithm.name")
        known = settings_of(self.row.function).keys() - {"baseline", "delta"}
        if odd := settings.keys() - known:
            raise InputError(
                f"{name} has no setting {sorted(odd)[0]!r}.",
                where="algorithm.options",
                fix=f"There are: {', '.join(sorted(known))}.",
            )
        self.settings: Mapping[str, Any] = settings
        self.limit = limit
        # of rewards, for bco
        self.mean = 0.0
        self.count = 0
        # by uid: companions that were chosen before the first step, with what the reference says of
        # them
        self.fixed: Mapping[str, Sample] = {}
        self.needs = frozenset(
            {"reference", "old"} if self.row.constant == "delta" else {"reference"}
        )

    def companions(self, samples: Sequence[Sample]) -> list[Sample]:
        if self.row.constant != "baseline":
            return []
        return (
            [self.fixed[sample.uid] for sample in samples]
            if self.fixed
            else mismatched(samples, self.limit)
        )

    def prepare(self, batches: Sequence[Batch], companions: Sequence[Batch] = ()) -> None:
        """Fills `constant`, and `class_size` (answers of the batch with the token's label) for the
        metrics.
        """
        labels = torch.cat(
            [constant(b.streams, "label", b.trained_lengths()) for b in batches]
        ).bool()
        sizes = torch.where(labels, labels.sum(), (~labels).sum()).float()
        value = 0.0
        if self.row.constant == "baseline":
            if not companions:
                raise ValueError(
                    "kto needs its companions: pack and annotate them, and pass them to prepare"
                )
            value = float(kto_baseline(*_old_and_reference(companions)))
        elif self.row.constant == "delta":
            old, reference = _old_and_reference(batches)
            self.count += len(old)
            self.mean += (
                (float((old - reference).mean()) * self.settings.get("beta", 0.1) - self.mean)
                * len(old)
                / self.count
            )
            value = self.mean
        for batch, size in zip(
            batches, sizes.split([len(b.samples) for b in batches]), strict=True
        ):
            batch.streams["constant"] = torch.full((batch.n_trained,), value)
            batch.streams["class_size"] = size[batch.sequence]

    def __call__(self, tokens: TrainedTokens, totals: Totals) -> tuple[Tensor, LossMetrics]:
        streams = tokens.streams
        rows = len(tokens.lengths)
        policy = sums(tokens.logprobs, tokens.sequence, rows)
        reference = sums(streams["reference"].to(policy.dtype), tokens.sequence, rows)
        good = constant(streams, "label", tokens.lengths).bool()
        shared = constant(streams, "constant", tokens.lengths).to(policy.dtype)
        given = {self.row.constant: shared} if self.row.constant else {}
        part, watched = self.row.function(policy, reference, good, **given, **self.settings)
        assert totals.samples > 0, "Totals.samples counts the rows of the batch: use Totals.of"
        loss = part.sum() / totals.samples

        share = watched["reward"] / constant(streams, "class_size", tokens.lengths).clamp(min=1).to(
            policy.dtype
        )
        chosen = share[good].sum()
        rejected = share[~good].sum()
        metrics: LossMetrics = {
            "preference/loss": loss.detach(),
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margin": chosen - rejected,
        }
        if self.row.constant:
            metrics[f"preference/{self.row.constant}"] = shared.sum() / totals.samples
        return loss, metrics

    def state(self) -> State:
        return State(meta={"mean": self.mean, "count": self.count})

    def load(self, state: State) -> None:
        self.mean = float(state.meta["mean"])
        self.count = int(state.meta["count"])


def mismatched(samples: Sequence[Sample], limit: int | None = None) -> list[Sample]:
    """Each prompt with the answer of the next sample of another group: y' that has nothing to do
    with x. `limit` cuts long rows.
    """
    rows = []
    for i, sample in enumerate(samples):
        others = (samples[(i + k) % len(samples)] for k in range(1, len(samples)))
        other = next((o for o in others if o.group != sample.group and o.n_trained), sample)
        cut = _first_trained(sample)
        start = _first_trained(other)
        tokens = torch.cat((sample.tokens[:cut], other.tokens[start:]))[:limit]
        trained = torch.cat((torch.zeros(cut, dtype=torch.bool), other.trained[start:]))[:limit]
        rows.append(Sample.from_tokens(sample.uid + MISMATCHED, tokens.tolist(), trained.tolist()))
    return rows


def _first_trained(sample: Sample) -> int:
    found = sample.trained.nonzero()
    return int(found[0]) if len(found) else len(sample.tokens)


def _old_and_reference(batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
    rows = [
        [sums(b.streams[name].double(), b.sequence, len(b.samples)) for b in batches]
        for name in ("old", "reference")
    ]
    return torch.cat(rows[0]), torch.cat(rows[1])
