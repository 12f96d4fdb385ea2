"""Dropout of an adapter, in the forward of an update only.

What is dropped of a row is a function of the run, the step, the layer and the row, so neither
packing nor a resume changes it, and layers that are computed again in the backward pass drop the
same. Generation, log-probs, references and evaluations have no dropout: they compute without
gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from reinforge.core.batch import Batch
from reinforge.core.errors import InputError
from reinforge.core.seeds import seed_of


@dataclass(frozen=True)
class DroppedRows:
    """Which rows are computed, and what decides what is dropped of them. A backend makes it for
    every micro-batch of an update, and `AdapterDropout` asks it.

    Only for packs without shared prompts: rows that share tokens cannot drop on their own. `here`:
    which tokens of the pack the model sees, if not all.
    """

    batch: Batch
    seed: Sequence[object]
    here: slice | None = None

    def kept(self, layer: str, x: Tensor, rate: float) -> Tensor:
        """[N, width of x] bool."""
        batch = self.batch
        assert batch.prefix is None and len(batch.lengths) == len(batch.samples), (
            "dropout needs packs without shared prompts"
        )
        generator = torch.Generator(x.device)
        rows = []
        for sample, length in zip(batch.samples, batch.lengths, strict=True):
            generator.manual_seed(seed_of(*self.seed, "dropout", layer, sample.uid))
            drawn = torch.rand(length, x.shape[-1], generator=generator, device=x.device)
            rows.append(drawn >= rate)
        whole = torch.cat(rows)
        return whole if self.here is None else whole[self.here]


class AdapterDropout(nn.Module):
    """Dropout on what one LoRA layer reads. `add_dropout` puts it where peft has its own, and the
    layer calls it.
    """

    def __init__(self, layer: str, rate: float):
        super().__init__()
        self.layer = layer
        self.rate = rate
        self.rows: DroppedRows | None = None  # None: nothing is trained now

    def forward(self, x: Tensor) -> Tensor:
        if self.rows is None or not torch.is_grad_enabled():
            return x
        kept = self.rows.kept(self.layer, x, self.rate)
        if kept.numel() != x.numel():
            raise InputError(
                f"{self.layer} does not read every token once (it is an expert, perhaps), and"
                " dropout is decided by token.",
                where="adapter.dropout",
                fix="Leave it out, or leave such layers out of adapter.targets.",
            )
        return torch.where(kept.view(x.shape), x / (1 - self.rate), 0.0).to(x.dtype)


def add_dropout(module: Any, rate: float) -> None:
    """Gives every LoRA layer of a peft model our dropout, and takes peft's own from it."""
    from peft.tuners.lora import LoraLayer

    for name, layer in module.named_modules():
        if isinstance(layer, LoraLayer):
            for adapter in layer.lora_dropout:
                layer.lora_dropout[adapter] = AdapterDropout(name, rate) if rate else nn.Identity()
    for described in module.peft_config.values():
        described.lora_dropout = rate


def dropouts(module: nn.Module) -> Iterator[AdapterDropout]:
    return (part for part in module.modules() if isinstance(part, AdapterDropout))


def drop_rows(module: nn.Module, rows: DroppedRows | None) -> None:
    """From now on the forward with gradients drops of these rows; None: nothing."""
    for part in dropouts(module):
        part.rows = rows
