"""`train.backend: fsdp`, `deepspeed` or `megatron` becomes ranks, and names the backend on them."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

from reinforge.backends.distributed.ranks import Ranks, current, how_many, serve
from reinforge.config.schema import Config
from reinforge.core.errors import InputError
from reinforge.core.torchrun import rank_here
from reinforge.models.load import pick_device

if TYPE_CHECKING:
    from reinforge.backends.distributed.driver import DistributedBackend

ON_RANKS = {  # imported by the run that trains on ranks: torch's own modules for that take a second
    "fsdp": "reinforge.backends.fsdp.backend:FsdpBackend",
    "deepspeed": "reinforge.backends.deepspeed.backend:DeepSpeedBackend",
    "megatron": "reinforge.backends.megatron.backend:MegatronBackend",
}


def backend_on_ranks(name: str) -> type[DistributedBackend]:
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


def ranks_planned(cfg: Config) -> int:
    """How many ranks a run of the config is expected to have, wherever it will be started: those
    that it asks for, or those of this machine.
    """
    try:
        return cfg.train.ranks or ranks_here(cfg)
    except InputError:  # there is no GPU here, and ranks were not counted
        return 1


def ranks_of(cfg: Config) -> Ranks | None:
    """The open ranks, where the config trains on them; None where one process does it, as in an
    evaluation.
    """
    return current() if cfg.train.backend in ON_RANKS else None


def sharded_checkpoints(cfg: Config) -> bool | None:
    """Whether ranks write checkpoints themselves; None: where they are large."""
    asked = cfg.run.checkpoint.sharded
    return None if asked == "auto" else asked
