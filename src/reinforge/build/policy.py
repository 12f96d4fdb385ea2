"""The sections `model` and `adapter` become the model that is trained.

On ranks every process loads it for itself, into host memory, before it is cut into shards. Rank 0
alone proves it: the others have the same files.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from reinforge.config.model import ModelConfig
from reinforge.config.schema import Config
from reinforge.core.seeds import seed_of
from reinforge.models.attention import MaskExtents, mask_extents, set_mask_extents
from reinforge.models.causal import CausalModel
from reinforge.models.freezing import freeze
from reinforge.models.load import load_model, load_scalar, pick_device, pick_dtype
from reinforge.models.packed import PackedModel


def load_policy(
    cfg: Config, *, scores: bool, in_host_memory: bool = False, proved: MaskExtents | None = None
) -> PackedModel:
    """The model with its adapter, or with the weights that are to stay without a gradient: a causal
    LM, or with `scores` what becomes a reward model. `proved`: what rank 0's proof of it found.
    """
    seed = seed_of(cfg.run.seed, "adapter") % 2**31
    model = host_memory(cfg.model) if in_host_memory else cfg.model
    loaded: PackedModel
    if scores:
        loaded = load_scalar(
            model,
            cfg.adapter,
            fresh=True,
            seed=seed,
            attributes=tuple(cfg.algorithm.attributes),
            proved=proved,
        )
    else:
        loaded = load_model(model, cfg.adapter, seed=seed, proved=proved)
    freeze(loaded.module, cfg.train)
    return loaded


def load_for_rank(
    cfg: Config, *, scores: bool, value_head: bool, proved: MaskExtents | None = None
) -> PackedModel:
    """What a rank loads before it is cut into shards."""
    model = load_policy(cfg, scores=scores, in_host_memory=True, proved=proved)
    if value_head and isinstance(model, CausalModel):
        model.add_value_head()
    return model


def proved_by_first(load: Callable[..., PackedModel]) -> PackedModel:
    """What every rank loads at the same moment. Rank 0 proves it and tells the others."""
    first = dist.get_rank() == 0
    model = load(proved=None if first else {})
    extents = [mask_extents(model.trunk)]
    dist.broadcast_object_list(extents, 0)
    set_mask_extents(model.trunk, extents[0])
    return model


def host_memory(cfg: ModelConfig) -> ModelConfig:
    """The section of a model in host memory, in the precision that it will have on the device."""
    dtype = str(pick_dtype(cfg.dtype, pick_device(cfg.device))).removeprefix("torch.")
    return cfg.model_copy(update={"device": "cpu", "dtype": dtype, "compile": False})


def compiles(cfg: ModelConfig) -> bool:
    """Whether the layers of the model are compiled. A run has made its choice before (`auto`:
    build/compile_choice.py); whatever else loads a model does not compile for `auto`.
    """
    return cfg.compile is True and pick_device(cfg.device).type == "cuda"


def move_to_device(model: CausalModel, cfg: ModelConfig) -> None:
    """Makes a copy in host memory one that generates."""
    model.module.to(pick_device(cfg.device))
    if compiles(cfg):
        model.compile_layers()
