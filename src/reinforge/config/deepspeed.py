"""The section `train.deepspeed`, and what the backend of that name does not do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, Literal

from pydantic import Field, model_validator

from reinforge.config.base import Section

Place = Literal["none", "cpu", "nvme"]


class DeepSpeedConfig(Section):
    """ZeRO (1910.02054): which of weights, gradients and moments are cut, and where they wait while
    they are not needed.
    """

    stage: Literal[2, 3] = Field(
        2,
        description="2: gradients, masters and moments are cut over the ranks. 3: the weights too.",
    )
    offload_optimizer: Place = Field(
        "none",
        description=(
            "Masters and moments: on the device, in host memory (cpu; the update is done there), or"
            " in files (nvme)."
        ),
    )
    offload_parameters: Place = Field(
        "none", description="Stage 3: where the cut weights are when no layer computes with them."
    )
    nvme_path: str | None = Field(
        None, description="Directory on a fast local disk for what is offloaded to nvme."
    )

    @model_validator(mode="after")
    def _possible(self) -> DeepSpeedConfig:
        if self.stage == 2 and self.offload_parameters != "none":
            raise ValueError(
                "offload_parameters: stage 2 keeps whole weights on every device; set stage: 3"
            )
        if self.stage == 2 and self.offload_optimizer == "nvme":
            raise ValueError(
                "offload_optimizer: DeepSpeed writes to nvme in stage 3 only; set stage: 3, or cpu"
            )
        uses = "nvme" in (self.offload_optimizer, self.offload_parameters)
        if uses and self.nvme_path is None:
            raise ValueError("nvme_path: what is offloaded to nvme needs a directory; set it")
        if self.nvme_path is not None and not uses:
            raise ValueError(
                "nvme_path: nothing is offloaded to nvme; remove it, or set offload_optimizer: nvme"
            )
        return self


def check_deepspeed(cfg: Any) -> None:
    """Raises ValueError, naming the key, for what runs on other backends only."""
    train = cfg.train
    algorithm = cfg.algorithm
    if train.backend != "deepspeed":
        if train.deepspeed != DeepSpeedConfig():
            raise ValueError(
                "train.deepspeed: only the backend deepspeed reads it; set train.backend=deepspeed,"
                " or remove it"
            )
        return
    if cfg.model.exact:
        raise ValueError(
            "model.exact: it is proved for one process; set train.backend=local, or leave it out"
        )
    if cfg.model.compile:
        raise ValueError(
            "model.compile: DeepSpeed's hooks are in the way of a compiler; set it to false, or"
            " train.backend=fsdp"
        )
    if cfg.adapter is not None and cfg.adapter.kind == "qlora":
        raise ValueError(
            "adapter.kind: a base in 4 bits is for one process; set train.backend=local, or use"
            " lora"
        )
    if train.ema is not None:
        raise ValueError(
            "train.ema: DeepSpeed keeps no average of its cut weights; leave it out, or set"
            " train.backend=fsdp"
        )
    if train.optimizer.offload or (
        cfg.critic is not None and cfg.critic.optimizer is not None and cfg.critic.optimizer.offload
    ):
        raise ValueError(
            "train.optimizer.offload: with DeepSpeed it is train.deepspeed.offload_optimizer=cpu"
        )
    if algorithm.kl.reference.kind != "frozen":
        raise ValueError(
            "algorithm.kl.reference: a reference that follows the weights needs train.backend=fsdp"
            " or local"
        )


def missing(cfg: Any) -> Iterator[tuple[str, str, str]]:
    """(key, what is wrong, what to do) for what this machine does not have."""
    if cfg.train.backend != "deepspeed":
        return
    if find_spec("deepspeed") is None:
        yield "train.backend", "DeepSpeed is not installed.", "pip install 'reinforge[deepspeed]'"
    path = cfg.train.deepspeed.nvme_path
    if path is not None and not os.path.isdir(path):
        yield (
            "train.deepspeed.nvme_path",
            f"there is no directory {path}.",
            "Make it on a fast local disk, on every machine of the run.",
        )
