"""Keys about several ranks, and which of them go together."""

from __future__ import annotations

from typing import Any

ON_RANKS = {"sequence_parallel": 1, "tensor_parallel": 1, "offload_weights": False}


def check_ranks(train: Any) -> None:
    """Raises ValueError, naming the key under `train`, for what one process or another backend
    cannot do.
    """
    if train.backend == "local" and (train.ranks or 1) > 1:
        raise ValueError(
            "ranks: the backend local is one process; set train.backend=fsdp, deepspeed or"
            f" megatron for {train.ranks}, or leave ranks out (train.ranks=null)"
        )
    known = {"fsdp": set(ON_RANKS), "megatron": {"tensor_parallel"}}.get(train.backend, set())
    used = [
        key for key, value in ON_RANKS.items() if getattr(train, key) != value and key not in known
    ]
    if used:
        others = "fsdp or megatron" if used[0] == "tensor_parallel" else "fsdp"
        raise ValueError(
            f"{used[0]}: the backend {train.backend} does not know it; set train.backend={others},"
            " or leave it out"
        )
    together = train.sequence_parallel * train.tensor_parallel
    if train.ranks is not None and train.ranks % together:
        raise ValueError(
            f"ranks: {train.ranks} cannot be dealt into groups of {together} (sequence_parallel x"
            f" tensor_parallel must divide it); set a multiple of {together}"
        )


def check_parallel(cfg: Any) -> None:
    """Raises ValueError for what does not go together in a whole config."""
    backend = cfg.train.backend
    if backend == "fsdp" and cfg.model.exact:
        raise ValueError(
            "model.exact: it is proved for one process; set train.backend=local, or leave it out"
        )
    if backend == "fsdp" and cfg.adapter is not None and cfg.adapter.kind == "qlora":
        raise ValueError(
            "adapter.kind: a base in 4 bits is for one process; set train.backend=local, or use"
            " lora"
        )
    if cfg.train.tensor_parallel > 1 and cfg.adapter is not None:
        raise ValueError(
            "train.tensor_parallel: the matrices of an adapter are not cut; set it to 1, or train"
            " all weights"
        )
    if cfg.train.sequence_parallel > 1 and cfg.teacher is not None:
        raise ValueError(
            "train.sequence_parallel: a teacher's distributions are not split over ranks; set it"
            " to 1"
        )
    if cfg.rollout.all_ranks and (
        backend == "local" or cfg.rollout.engine != "native" or cfg.cluster.kind != "local"
    ):
        raise ValueError(
            "rollout.all_ranks: it is for the native engine on the ranks of train.backend fsdp,"
            " deepspeed or megatron; leave it out"
        )
    if cfg.run.checkpoint.sharded is True and backend != "fsdp":
        raise ValueError(
            f"run.checkpoint.sharded: the backend {backend} writes whole tensors; leave it out"
        )
