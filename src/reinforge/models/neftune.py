"""NEFTune: noise on the input embeddings while training (2310.05914)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from reinforge.core.batch import Batch
from reinforge.core.seeds import seed_of


@contextmanager
def neftune(
    embedding: nn.Module,
    batch: Batch,
    *,
    alpha: float,
    seed: Sequence[object],
    here: slice = slice(None),
) -> Iterator[None]:
    """Within it, `embedding` (a model's input embeddings) adds alpha / sqrt(L E) · U(-1, 1) to the
    tokens of the pack, L being the length of the token's own row and E the width.

    >>> with neftune(model.get_input_embeddings(), batch, alpha=5.0, seed=(run_seed, step)):

    The noise of a row is a function of `seed` and the row's uid, so neither packing nor a resume
    changes it. Only for packs without shared prompts: rows that share tokens cannot have noise of
    their own. `here`: which tokens of the pack the model sees, if not all.
    """
    assert batch.prefix is None and len(batch.lengths) == len(batch.samples), (
        "NEFTune needs packs without shared prompts"
    )

    def add(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + _noise(batch, output.shape[-1], alpha, seed)[here].to(
            output.device, output.dtype
        ).view(output.shape)

    handle = embedding.register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()


def _noise(batch: Batch, width: int, alpha: float, seed: Sequence[object]) -> Tensor:
    """[N, E] float32, drawn on the CPU."""
    rows = []
    for sample, length in zip(batch.samples, batch.lengths, strict=True):
        generator = torch.Generator().manual_seed(seed_of(*seed, "neftune", sample.uid))
        rows.append(
            (2 * torch.rand(length, width, generator=generator) - 1)
            * (alpha / math.sqrt(max(length, 1) * width))
        )
    return torch.cat(rows) if rows else torch.zeros(0, width)
