"""Rows that can teach.

A row whose advantages are all 0 has no gradient under most policy losses, so it need not be
computed: in a group that is solved or hopeless that is every row, and of such groups there are
often more than of the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from reinforge.core.batch import Batch, pack
from reinforge.core.sample import Sample, Stop


def why_masked(sample: Sample, overlong: str) -> str | None:
    """Why nothing of a sample may be trained: unscored, error, or overlong (cut off by the token
    limit under `overlong: mask`). None where it may.
    """
    if sample.reward is None:
        return "unscored"
    if sample.stop is Stop.ERROR:
        return "error"
    return "overlong" if overlong == "mask" and sample.stop is Stop.LENGTH else None


def active_samples(batches: Sequence[Batch]) -> list[torch.Tensor]:
    """For each batch, which of its samples have an advantage other than 0."""
    return [
        torch.zeros(len(b.samples)).index_add_(0, b.sequence, b.streams["advantages"].abs()) > 0
        for b in batches
    ]


def signal_share(batches: Sequence[Batch]) -> float | None:
    """The share of samples that can teach; None where the algorithm has no advantages."""
    if not all("advantages" in b.streams for b in batches):
        return None
    samples = sum(len(b.samples) for b in batches)
    return float(sum(int(a.sum()) for a in active_samples(batches))) / samples if samples else 0.0


def with_signal(batches: Sequence[Batch], budget: int, *, share: bool) -> list[Batch]:
    """The samples with an advantage other than 0, packed anew with their streams.

    Totals are counted before, on all samples.

    Where no sample has one the first batch is kept: its gradient is 0, and entropy and KL are what
    one wants to see of such a step.
    """
    active = active_samples(batches)
    if all(bool(a.all()) for a in active):
        return list(batches)
    if not any(bool(a.any()) for a in active):
        return list(batches[:1])
    streams: dict[int, dict[str, torch.Tensor]] = {}
    kept = []
    for batch, wanted in zip(batches, active, strict=True):
        ends = [0, *batch.trained_lengths().cumsum(0).tolist()]
        for i, sample in enumerate(batch.samples):
            if wanted[i]:
                kept.append(sample)
                streams[id(sample)] = {
                    name: stream[ends[i] : ends[i + 1]] for name, stream in batch.streams.items()
                }
    packs = pack(kept, budget, share=share)
    for batch in packs:
        parts = [streams[id(sample)] for sample in batch.samples]
        batch.streams = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return packs
