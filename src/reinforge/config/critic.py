"""The section `critic`: the value model."""

from __future__ import annotations

from pydantic import Field, model_validator

from reinforge.config.base import Checkpointing, Natural, NonNegative, Positive, Section
from reinforge.config.optimizer import OptimizerConfig
from reinforge.config.train import ScheduleConfig


class CriticConfig(Section):
    """The value model of algorithms whose advantage needs one (ppo, vapo, or `advantage: gae`)."""

    path: str | None = Field(
        None,
        description=(
            "A causal LM or sequence classifier to start from. Default: the policy's checkpoint. A"
            " causal LM gets a head that starts at 0."
        ),
    )
    shared: bool = Field(
        False,
        description=(
            "A value head on the policy's own trunk instead of a second model: half the memory, one"
            " optimizer."
        ),
    )
    coefficient: Positive | None = Field(
        None, description="shared: weight of the value loss beside the policy's; default 0.5."
    )
    clip: Positive | None = Field(
        0.2,
        description=(
            "The value loss does not reward moving further than this from the old value, in units"
            " of reward. null: no clipping."
        ),
    )
    warmup: Natural = Field(
        0, description="Steps at the start in which only the critic is trained."
    )
    learning_rate: NonNegative | None = Field(
        None, description="Of the critic; default: train.learning_rate."
    )
    schedule: ScheduleConfig | None = Field(
        None, description="Of the critic's learning rate; default: train.schedule."
    )
    optimizer: OptimizerConfig | None = Field(
        None, description="Of the critic; default: train.optimizer."
    )
    gradient_checkpointing: Checkpointing | None = Field(
        None, description="Of the critic; default: model.gradient_checkpointing."
    )

    @model_validator(mode="after")
    def _useful(self) -> CriticConfig:
        own = [
            n
            for n in ("path", "learning_rate", "schedule", "optimizer", "gradient_checkpointing")
            if getattr(self, n) is not None
        ]
        if self.shared and (own or self.warmup):
            raise ValueError(
                f"{(own or ['warmup'])[0]}: a shared critic is trained with the policy and has none"
                " of its own; leave it out"
            )
        if not self.shared and self.coefficient is not None:
            raise ValueError(
                "coefficient: only a shared critic has one; a critic of its own has learning_rate"
            )
        return self
