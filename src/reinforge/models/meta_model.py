"""A model on torch's `meta` device: its modules and shapes, as a run would have them, and no
numbers. `plan` counts on it what a run holds and trains.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from reinforge.config.adapter import AdapterConfig
from reinforge.config.saved_adapter import as_saved, check_base, other_model, shapes
from reinforge.config.train import TrainConfig
from reinforge.core.model_facts import ModelFacts
from reinforge.models.adapters import add_adapter
from reinforge.models.freezing import freeze
from reinforge.models.weight_kinds import WeightCounts, count_weights

ATTENTION = (".q_proj", ".k_proj", ".v_proj", ".o_proj")


def on_meta(shape: Any, train: TrainConfig, adapter: AdapterConfig | None) -> nn.Module:
    """The causal LM of a transformers configuration, frozen or with an adapter as a run makes
    it.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        module: nn.Module = AutoModelForCausalLM.from_config(shape)
        if adapter is not None:
            if adapter.path is not None:
                check_base(adapter.path, shape)
            module = add_adapter(module, _as_new(adapter), seed=0)
            if adapter.path is not None:
                _check_sizes(adapter.path, module)
        else:
            freeze(module, train)
    return module


def _check_sizes(path: str, module: nn.Module) -> None:
    """Refuses a saved adapter whose factors are of other sizes than the model's attention."""
    own = {name.replace(".default.", "."): p.shape for name, p in module.named_parameters()}
    for name, shape in shapes(path).items():
        side = 1 if ".lora_A." in name else 0
        if name not in own or not name.split(".lora_")[0].endswith(ATTENTION):
            continue
        if shape[side] != own[name][side]:
            what = "reads" if side else "gives"
            raise other_model(
                path,
                f"has {name}, which {what} {shape[side]} numbers, and in this model it {what}"
                f" {own[name][side]}",
            )


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
