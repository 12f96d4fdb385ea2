"""What makes an update of the gradients: `train.optimizer`, and `critic.optimizer`."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import Field, field_validator, model_validator

from reinforge.config.base import Fraction, NonNegative, Positive, Section

# what each takes under `options`, beside the keys of the section
OPTIONS: dict[str, tuple[str, ...]] = {
    "adamw": (),
    "muon": ("momentum", "nesterov", "ns_steps", "adjust_lr_fn"),
    "lion": ("betas",),
    "adafactor": ("beta2_decay", "d"),
}
# which of them read `betas` and `eps`
MOMENTS = ("adamw", "muon")
USUAL_BETAS = (0.9, 0.999)
USUAL_EPS = 1e-8


class ParameterGroupConfig(Section):
    match: list[str] = Field(
        min_length=1,
        description=(
            "Names or patterns of modules and weights, as in train.freeze: `*embed*`,"
            " `model.layers.[0-7]`."
        ),
    )
    rate: NonNegative = Field(
        1.0, description="Their learning rate is so many times train.learning_rate."
    )
    weight_decay: NonNegative | None = Field(
        None,
        description=(
            "Of all of them, vectors too. Default: as of the others, which is"
            " train.optimizer.weight_decay for matrices and 0 for vectors."
        ),
    )


class OptimizerConfig(Section):
    name: str = Field(
        "adamw",
        description=(
            "adamw; muon (matrices of layers by Muon, all else by AdamW), lion, adafactor; or a"
            " torch optimizer of your own: `file.py:Class` or `package.module:Class`."
        ),
    )
    options: dict[str, Any] = Field(
        {},
        description=(
            "More settings of the optimizer. muon: momentum, nesterov, ns_steps, adjust_lr_fn."
            " lion: betas. adafactor: beta2_decay, d. Your own: its keyword arguments."
        ),
    )
    betas: tuple[Fraction, Fraction] = Field(
        USUAL_BETAS, description="Decay of AdamW's two moments."
    )
    eps: Positive = Field(USUAL_EPS, description="AdamW: added to the root of the second moment.")
    weight_decay: NonNegative = Field(
        0.0, description="Decoupled: times learning_rate, not in the gradient."
    )
    groups: list[ParameterGroupConfig] = Field(
        [],
        description=(
            "Weights that learn at another rate or decay otherwise. The first group that matches a"
            " weight has it."
        ),
    )
    lora_plus: Positive | None = Field(
        None,
        description=(
            "LoRA+: the matrices B of an adapter learn so many times as fast as everything else; 16"
            " is usual (2402.12354). Off by default."
        ),
    )
    offload: bool = Field(
        False,
        description=(
            "Keep master weights and moments in host memory and update there: 12 bytes per weight"
            " less on the GPU, slower steps."
        ),
    )

    @property
    def own(self) -> bool:
        """Whether it is not one of ours."""
        return self.name not in OPTIONS

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name in OPTIONS or ":" in name:
            return name
        near = difflib.get_close_matches(name.lower(), OPTIONS, 1)
        raise ValueError(
            f"there is no optimizer {name!r}"
            + (f"; did you mean {near[0]}?" if near else f"; there are: {', '.join(OPTIONS)}")
            + " Your own: file.py:Class, or of torch: torch.optim:SGD"
        )

    @model_validator(mode="after")
    def _read(self) -> OptimizerConfig:
        """A setting that the optimizer would not read is refused."""
        if not self.own:
            odd = [key for key in self.options if key not in OPTIONS[self.name]]
            if odd:
                known = ", ".join(OPTIONS[self.name]) or "none"
                raise ValueError(f"options: {self.name} does not read {odd[0]!r}; it has: {known}")
        elif "lr" in self.options or "weight_decay" in self.options:
            raise ValueError(
                "options: the rate is train.learning_rate, the decay train.optimizer.weight_decay"
            )
        if self.name not in MOMENTS:
            for key, usual in (("betas", USUAL_BETAS), ("eps", USUAL_EPS)):
                if getattr(self, key) != usual:
                    raise ValueError(
                        f"{key}: read by {' and '.join(MOMENTS)} only; {self.name} has options"
                    )
        return self
