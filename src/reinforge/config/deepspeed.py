"""The section `train.deepspeed`: how the backend of that name cuts and offloads."""

from __future__ import annotations

from typing import Literal

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
