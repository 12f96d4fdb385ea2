"""The numbers of a model before it is loaded: from its configuration, and from a model without
numbers.
"""

from __future__ import annotations

from typing import Any

from reinforge.backends.roofline import Machine
from reinforge.build.ranks import ranks_planned
from reinforge.config.saved_adapter import as_saved
from reinforge.config.schema import Config
from reinforge.core.model_facts import ModelFacts
from reinforge.models.weight_kinds import WeightCounts


def facts_before_loading(
    cfg: Config, machine: Machine, shape: Any, counts: WeightCounts
) -> ModelFacts:
    """The model from its configuration, with its weights counted on a model without numbers."""
    adapter = None if cfg.adapter is None else as_saved(cfg.adapter)
    narrow = {"cpu": "float32"}.get(machine.kind)
    return ModelFacts.of(
        shape.get_text_config(),
        weights=counts.base,
        trained=counts.trained,
        matrices=counts.matrices,
        met=counts.met,
        packed=counts.linear if adapter and adapter.kind == "qlora" else 0,
        head_norms=counts.head_norms,
        itemsize=4 if "float32" in (cfg.model.dtype, narrow) else 2,
        rank=adapter.rank if adapter else None,
        checkpointing=bool(cfg.model.gradient_checkpointing),
        on_host=cfg.model.gradient_checkpointing == "host" and machine.kind == "cuda",
        compiled=cfg.model.compile is True and machine.kind == "cuda",
        fused=machine.kind == "cuda" and not cfg.model.exact,
        shards=ranks_planned(cfg) if cfg.train.backend == "fsdp" else None,
        **cfg.train.optimizer.facts(),
    )
