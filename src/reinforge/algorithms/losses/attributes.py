"""The loss of a reward model with several heads: a regression per attribute (SteerLM, 2310.05344).

Legend: M trained tokens of the micro-batch, S answers, A attributes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from reinforge.algorithms.losses.reward_model import regression
from reinforge.algorithms.losses.rows import constant
from reinforge.core.backend import Loss, TrainedTokens
from reinforge.core.batch import Batch, Totals
from reinforge.core.metrics import LossMetrics
from reinforge.core.sample import Sample


def target(attribute: str) -> str:
    """The stream with what an answer was given for the attribute; NaN where it was given nothing.

    >>> target("verbosity")
    'target/verbosity'
    """
    return f"target/{attribute}"


def _count(attribute: str) -> str:
    """The stream with how many answers of the optimizer batch were given the attribute."""
    return f"count/{attribute}"


class AttributeLoss(Loss):
    """sum over answers i and their attributes a of (r_ia - t_ia)^2, divided by how many there are
    in the optimizer batch: every number that was given counts the same, and one that was not given
    nothing.

    The numbers of an answer are the heads at its last trained token (`TrainedTokens.values`,
    [M, A], or [M] of one head). `build_losses.py` makes it, backends call it.
    """

    reads = frozenset({"values_after"})

    def __init__(self, attributes: Sequence[str]):
        self.attributes = tuple(attributes)

    @property
    def targets(self) -> dict[str, str]:
        """The stream with what an answer was given, by attribute."""
        return {name: target(name) for name in self.attributes}

    def companions(self, samples: Sequence[Sample]) -> list[Sample]:
        return []

    def prepare(self, batches: Sequence[Batch], companions: Sequence[Batch] = ()) -> None:
        """Counts who was given what, over the whole batch."""
        for name in self.attributes:
            given = [
                constant(batch.streams, target(name), batch.trained_lengths()) for batch in batches
            ]
            count = sum(int((~one.isnan()).sum()) for one in given)
            for batch in batches:
                batch.streams[_count(name)] = torch.full((batch.n_trained,), float(count))

    def __call__(self, tokens: TrainedTokens, totals: Totals) -> tuple[Tensor, LossMetrics]:
        assert tokens.values is not None
        values = tokens.values.reshape(len(tokens.values), -1)
        assert values.shape[1] == len(self.attributes), "a head for every attribute"

        def row(stream: str) -> Tensor:
            return constant(tokens.streams, stream, tokens.lengths).to(values.dtype)

        scores_SA = constant({"score": values}, "score", tokens.lengths)
        targets_SA = torch.stack([row(target(name)) for name in self.attributes], dim=1)
        counts_SA = torch.stack([row(_count(name)) for name in self.attributes], dim=1)
        given_SA = ~targets_SA.isnan()
        # where nothing was given, the target is the score itself: no loss and no gradient
        targets_SA = torch.where(given_SA, targets_SA, scores_SA.detach())
        errors_SA = regression(scores_SA, targets_SA)

        loss = (errors_SA / counts_SA.sum(1, keepdim=True).clamp(min=1)).sum()
        metrics: LossMetrics = {"reward/loss": loss.detach()}
        shares_SA = given_SA / counts_SA.clamp(min=1)
        for i, name in enumerate(self.attributes):
            # a batch in which nobody was given it has nothing to say about it
            if bool((counts_SA[:, i] > 0).any()):
                metrics[f"reward/loss/{name}"] = (errors_SA * shares_SA).detach()[:, i].sum()
                metrics[f"reward/mean/{name}"] = (scores_SA * shares_SA).detach()[:, i].sum()
        return loss, metrics
