"""A model on torch's `meta` device: its modules and shapes, as a run would have them, and no
numbers. `plan` counts on it what a run holds and trains.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from reinforge.config.adapter import AdapterConfig
from reinforge.config.saved_adapter import as_saved
from reinforge.config.train import TrainConfig
from reinforge.core.model_facts import ModelFacts
from reinforge.models.adapters import add_adapter
from reinforge.models.freezing import freeze
from reinforge.models.weight_kinds import WeightCounts, count_weights


def on_meta(shape: Any, train: TrainConfig, adapter: AdapterConfig | None) -> nn.Module:
    """The causal LM of a transformers configuration, frozen or with an adapter as a run makes
    it.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        module: nn.Module = AutoModelForCausalLM.from_config(shape)
        if adapter is not None:
            module = add_adapter(module, _as_new(adapter), seed=0)
        else:
            freeze(module, train)
    return module


def count_on_meta(
    shape: Any, train: TrainConfig, adapter: AdapterConfig | None = None
) -> WeightCounts:
    """How many weights such a model has and trains."""
    facts = ModelFacts.of(shape.get_text_config())
    module = on_meta(shape, train, adapter)
    return count_weights(module, experts=facts.experts, active=facts.active)


def _as_new(adapter: AdapterConfig) -> AdapterConfig:
    """One of the same shape that needs no numbers to begin: neither those of a saved adapter nor
    the singular values of the base.
    """
    plain: dict[str, Any] = {"init": "default", "path": None, "dropout": 0.0}
    if adapter.kind == "qlora":
        plain["kind"] = "lora"
    return as_saved(adapter).model_copy(update=plain)
