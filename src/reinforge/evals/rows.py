"""Scores a model on held-out rows without generating: the loss it is trained with, and what a
reward model's scores are worth.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from reinforge.core.backend import Backend, Loss
from reinforge.core.batch import Totals, pack
from reinforge.core.prepare import prepared
from reinforge.core.sample import Sample

BINS = 10  # of confidence, between 1/2 and 1
HIDDEN = ("train/", "logps/")  # metrics that say nothing more of held-out rows


def heldout_rows(
    backend: Backend, loss: Loss, units: Sequence[Sequence[Sample]]
) -> dict[str, float]:
    """The metrics of the loss over all held-out rows as one batch: eval/loss, eval/accuracy,
    eval/margin, ... A loss that learns from what it sees (a running mean) does not learn from
    these.
    """
    own = copy.copy(loss)
    batches = prepared(backend, own, [sample for unit in units for sample in unit])
    found = backend.evaluate(batches, own, Totals.of(batches))
    return {
        f"eval/{name.partition('/')[2]}": float(value)
        for name, value in found.items()
        if not name.startswith(HIDDEN)
    } | {"eval/n": len(units)}


def heldout_scores(backend: Backend, units: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """Of a reward model on held-out pairs: eval/calibration, the expected error of sigma(margin) as
    a probability.
    """
    scores = _scores(backend, units)
    margins = torch.stack([scores[chosen.uid] - scores[rejected.uid] for chosen, rejected in units])
    return {"eval/calibration": calibration_error(margins[:, 0])}


def heldout_attributes(
    backend: Backend, targets: Mapping[str, str], units: Sequence[Sequence[Sample]]
) -> dict[str, float]:
    """Of an attribute model on held-out answers: eval/correlation/NAME, Pearson's, of what it says
    with what was given. `targets`: the stream of each attribute, in the order of the heads.

    Fewer than two answers that were given it, or all of them the same, have no correlation.
    """
    samples = [sample for unit in units for sample in unit]
    scores = _scores(backend, units)
    said = torch.stack([scores[sample.uid] for sample in samples])
    found: dict[str, float] = {}
    for i, (name, stream) in enumerate(targets.items()):
        given = torch.stack([sample.streams[stream][-1] for sample in samples]).double()
        there = ~given.isnan()
        value = correlation(said[there, i], given[there])
        if value is not None:
            found[f"eval/correlation/{name}"] = value
    return found


def _scores(backend: Backend, units: Sequence[Sequence[Sample]]) -> dict[str, Tensor]:
    """[A] float64 by uid: what the heads say of each held-out answer, at its last token."""
    scores: dict[str, Tensor] = {}
    for batch in pack(
        [sample for unit in units for sample in unit], backend.budget, share=backend.share
    ):
        backend.annotate([batch], frozenset({"values_after"}))
        ends = batch.trained_lengths().cumsum(0) - 1
        values = batch.streams["values_after"].double().reshape(batch.n_trained, -1)
        scores |= {sample.uid: values[end] for sample, end in zip(batch.samples, ends, strict=True)}
    return scores


def correlation(x: Tensor, y: Tensor) -> float | None:
    """Pearson's; None where one of them does not vary.

    >>> correlation(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 4.0, 6.0]))
    1.0
    """
    if len(x) < 2:
        return None
    a, b = (z.double() - z.double().mean() for z in (x, y))
    size = float(a.norm() * b.norm())
    return float(a @ b) / size if size > 0 else None


def calibration_error(margins: Tensor) -> float:
    """sum over bins of confidence c = max(p, 1 - p), p = sigma(margin), of n_b / n · |share that is
    right - mean confidence| (1706.04599). A tie is half right.

    >>> calibration_error(torch.zeros(4)), round(calibration_error(torch.full((4,), 40.0)), 9)
    (0.0, 0.0)
    """
    confidence = torch.sigmoid(margins.double().abs())
    right = 0.5 * (1 + margins.double().sign())
    place = ((confidence - 0.5) * 2 * BINS).long().clamp(max=BINS - 1)
    count, sums, hits = (
        torch.zeros(BINS, dtype=torch.float64).index_add_(0, place, x)
        for x in (torch.ones_like(right), confidence, right)
    )
    return float((sums - hits).abs().sum() / count.sum())
