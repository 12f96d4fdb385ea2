"""`train.backend: fsdp`, `deepspeed` or `megatron` becomes ranks and backends on them.

What is loaded, is loaded by every rank for itself, into host memory.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

from reinforge.backends.distributed.ranks import Ranks, current, how_many, rank_here, serve
from reinforge.config.adapter import AdapterConfig
from reinforge.config.model import ModelConfig
from reinforge.config.schema import Config
from reinforge.core.engine import Engine
from reinforge.core.errors import InputError
from reinforge.engines.native import NativeEngine
from reinforge.models.causal import CausalModel
from reinforge.models.load import load_model, load_scalar, pick_device, pick_dtype
from reinforge.models.packed import PackedModel

if TYPE_CHECKING:
    from reinforge.backends.distributed.driver import DistributedBackend
    from reinforge.backends.local import LocalBackend

AnyBackend: TypeAlias = "LocalBackend | DistributedBackend"
ON_RANKS = {  # imported by the run that trains on ranks: torch's own modules for that take a second
    "fsdp": "reinforge.backends.fsdp.backend:FsdpBackend",
    "deepspeed": "reinforge.backends.deepspeed.backend:DeepSpeedBackend",
    "megatron": "reinforge.backends.megatron.backend:MegatronBackend",
}


def on_ranks(name: str) -> type[DistributedBackend]:
    """The backend of `train.backend`, one of those on ranks."""
    module, _, kind = ON_RANKS[name].partition(":")
    found: type[DistributedBackend] = getattr(import_module(module), kind)
    return found


def open_ranks(cfg: Config) -> AbstractContextManager[Any]:
    """The processes that the config asks for, for as long as the block lasts.

    Ranks other than 0 serve, and never return from here.
    """
    if cfg.train.backend not in ON_RANKS:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "TORCHELASTIC_RUN_ID" in os.environ:
            raise InputError(
                f"torchrun started {os.environ['WORLD_SIZE']} processes, and this run has one.",
                where="train.backend",
                fix="Set train.backend=fsdp, or start it without torchrun.",
            )
        return nullcontext()
    if rank_here() > 0:
        serve()
    return Ranks.open(cfg.train.ranks, pick_device(cfg.model.device).type)


def ranks_here(cfg: Config) -> int:
    """How many ranks the config would start on this machine; an error where it cannot."""
    return how_many(cfg.train.ranks, pick_device(cfg.model.device).type)


def ranks_of(cfg: Config) -> Ranks | None:
    """The open ranks, where the config trains on them; None where one process does it, as in an
    evaluation.
    """
    return current() if cfg.train.backend in ON_RANKS else None


def hosted(cfg: ModelConfig) -> ModelConfig:
    """The model in host memory, in the precision that it will have on the device."""
    dtype = str(pick_dtype(cfg.dtype, pick_device(cfg.device))).removeprefix("torch.")
    return cfg.model_copy(update={"device": "cpu", "dtype": dtype, "compile": False})


def load_policy(
    cfg: ModelConfig, adapter: AdapterConfig | None, seed: int, scalar: bool, value_head: bool
) -> PackedModel:
    """What every rank loads before it is cut."""
    if scalar:
        return load_scalar(cfg, adapter, fresh=True, seed=seed)
    model = load_model(cfg, adapter, seed=seed)
    if value_head:
        model.add_value_head()
    return model


def in_pieces(cfg: Config) -> bool | None:
    """Whether ranks write checkpoints themselves; None: where they are large."""
    asked = cfg.run.checkpoint.sharded
    return None if asked == "auto" else asked


def compiles(cfg: ModelConfig) -> bool:
    return cfg.compile and pick_device(cfg.device).type == "cuda"


def onto_device(model: CausalModel, cfg: ModelConfig) -> None:
    """The host's copy becomes the one that rank 0 generates with."""
    model.module.to(pick_device(cfg.device))
    if compiles(cfg):
        model.compile_layers()


def on_all_ranks(
    ranks: Ranks,
    own: Engine,
    cfg: Config,
    loading: tuple[AdapterConfig | None, int, bool],
    stops: frozenset[int],
    context: int,
    longest: int,
) -> Engine:
    """The engine of rank 0 and one like it on every other rank."""
    from reinforge.cluster.ranked import RankedEngine

    assert isinstance(own, NativeEngine)
    return RankedEngine(ranks, own, partial(_engine, cfg, loading, stops, context, longest))


def _engine(
    cfg: Config,
    loading: tuple[AdapterConfig | None, int, bool],
    stops: frozenset[int],
    context: int,
    longest: int,
) -> NativeEngine:
    model = load_policy(hosted(cfg.model), *loading, False)
    assert isinstance(model, CausalModel)
    onto_device(model, cfg.model)
    rollout = cfg.rollout
    return NativeEngine(
        model,
        stop_tokens=stops,
        max_batch=rollout.max_batch,
        kv_gib=rollout.kv_gib,
        context=context,
        longest=longest,
        prefix_cache=rollout.prefix_cache,
    )
