"""What `train.backend: megatron` does not do. It has no section: `train.ranks` and `train.tensor_parallel` are all it needs."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any


def check_megatron(cfg: Any) -> None:
    """Raises ValueError, naming the key, for what runs on other backends only."""
    train = cfg.train
    if train.backend != "megatron":
        return
    if cfg.model.exact:
        raise ValueError("model.exact: it is proved for one process; set train.backend=local, or leave it out")
    if cfg.model.compile:
        raise ValueError("model.compile: Megatron's layers are not compiled; set it to false, or train.backend=fsdp")
    if cfg.adapter is not None:
        raise ValueError("adapter: Megatron's layers train whole weights; leave it out, or set train.backend=fsdp")
    if cfg.critic is not None:
        raise ValueError(
            "critic: the backend megatron trains causal LMs only; set train.backend=fsdp, or use an algorithm without a critic"
        )
    if cfg.teacher is not None:
        raise ValueError("teacher: distillation was not tried with Megatron; set train.backend=fsdp")
    for key in ("ema", "neftune"):
        if getattr(train, key) is not None:
            raise ValueError(f"train.{key}: the backend megatron does not know it; leave it out, or set train.backend=fsdp")
    if train.optimizer.offload:
        raise ValueError("train.optimizer.offload: the backend megatron does not know it; set train.backend=fsdp and train.offload_weights")
    if cfg.algorithm.kl.reference.kind != "frozen" or cfg.algorithm.name == "tr_dpo":
        raise ValueError("algorithm.kl.reference: a reference that follows the weights needs train.backend=fsdp or local")


def missing(cfg: Any) -> Iterator[tuple[str, str, str]]:
    """(key, what is wrong, what to do) for what this machine does not have."""
    if cfg.train.backend == "megatron" and find_spec("megatron") is None:
        yield "train.backend", "megatron-core is not installed.", "pip install 'reinforge[megatron]'"
