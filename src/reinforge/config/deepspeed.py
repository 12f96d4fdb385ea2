"""The section `train.deepspeed`: how the backend of that name cuts and offloads."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from reinforge.config.base import Count, Section

Place = Literal["none", "cpu", "nvme"]


class DeepSpeedConfig(Section):
    """ZeRO (1910.02054): which of weights, gradients and moments are cut, and where they wait while
    they are not needed.
    """

    stage: Literal[0, 1, 2, 3] = Field(
        2,
        description=(
            "0: nothing is cut, and gradients are added up once per optimizer step; for"
            " model.dtype float32. 1: moments are cut over the ranks, else as 0. 2: gradients are"
            " cut too, and added up after every micro-batch. 3: the weights too."
        ),
    )
    overlap: bool = Field(
        False,
        description=(
            "Stages 2 and 3: gradients are added up over the ranks while the backward pass goes"
            " on. Takes memory for a second bucket."
        ),
    )
    reduce_bucket: Count | None = Field(
        None,
        description="Elements of gradients that are added up at once; null: DeepSpeed's own.",
    )
    gather_bucket: Count | None = Field(
        None,
        description=(
            "Elements of weights that are gathered at once: after an update (stages 1 and 2), or"
            " ahead of the layer that needs them (stage 3). null: DeepSpeed's own."
        ),
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
        if self.stage < 2 and self.overlap:
            raise ValueError(
                f"overlap: stage {self.stage} adds gradients up once, after the last backward pass;"
                " set stage: 2, or overlap: false"
            )
        if self.stage == 0 and (self.reduce_bucket or self.gather_bucket):
            raise ValueError(
                "reduce_bucket, gather_bucket: stage 0 gathers nothing, and adds up in buckets of"
                " DeepSpeed's own; leave them out"
            )
        if self.stage < 2 and self.offload_optimizer != "none":
            raise ValueError(
                "offload_optimizer: only from stage 2 on is there a place for gradients in host"
                " memory; set stage: 2"
            )
        if self.stage < 3 and self.offload_parameters != "none":
            raise ValueError(
                f"offload_parameters: stage {self.stage} keeps whole weights on every device; set"
                " stage: 3"
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
