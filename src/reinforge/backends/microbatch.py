"""The one micro-batch pass that every backend runs, and the size of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from reinforge.core.backend import Loss, TrainedTokens
from reinforge.core.batch import Batch, Totals
from reinforge.models.causal import CausalModel


def trained_tokens(model: CausalModel, batch: Batch, loss: Loss, totals: Totals, temperature: float) -> TrainedTokens:
    """The forward of one micro-batch, as the loss wants to see it."""
    logprobs, entropy = model.logprobs(batch, temperature=temperature, entropy=loss.entropy, entropy_gradient=loss.entropy_gradient)
    whole = torch.tensor([totals.episode_tokens.get(s.episode, 1) for s in batch.samples], device=logprobs.device)
    lengths = torch.bincount(batch.sequence, minlength=len(batch.samples))
    return TrainedTokens(logprobs, entropy, batch.sequence, lengths, whole[batch.sequence], batch.streams)


def combine(parts: Sequence[dict[str, Tensor]]) -> dict[str, float]:
    """Metrics of micro-batches: sums, except names ending in /max and /min. One transfer from the device."""
    names = sorted({name for part in parts for name in part})
    columns = []
    for name in names:
        values = torch.stack([part[name].detach().float() for part in parts if name in part])
        columns.append(values.max() if name.endswith("/max") else values.min() if name.endswith("/min") else values.sum())
    return dict(zip(names, torch.stack(columns).tolist(), strict=True)) if names else {}


def auto_budget(model: CausalModel) -> int:
    """Packed tokens per micro-batch: what fits in a third of the free memory on a GPU, what runs best on a CPU."""
    if model.device.type != "cuda":
        return 4096
    config = model.config
    width, layers = config.hidden_size, config.num_hidden_layers
    inner = getattr(config, "intermediate_size", None) or 4 * width
    per_token = layers * (20 * width + 4 * inner) * 2  # activations kept for the backward, bfloat16
    if getattr(model.causal, "is_gradient_checkpointing", False):
        per_token = layers * 2 * width * 2 + (20 * width + 4 * inner) * 2
    free = torch.cuda.mem_get_info(model.device)[0]
    return max(1024, min(65536, int(free / 3 / per_token) // 1024 * 1024))
