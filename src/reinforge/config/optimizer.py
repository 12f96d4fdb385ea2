"""What makes an update of the gradients: `train.optimizer`, and `critic.optimizer`."""

from __future__ import annotations

import difflib
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from reinforge.config.base import Fraction, NonNegative, Positive, Section

# what each takes under `options`, beside the keys of the section
OPTIONS: dict[str, tuple[str, ...]] = {
    "adamw": (),
    "adamw_8bit": (),
    "muon": ("momentum", "nesterov", "ns_steps", "adjust_lr_fn"),
    "lion": ("betas",),
    "adafactor": ("beta2_decay", "d"),
}
# which of them read `betas` and `eps`
MOMENTS = ("adamw", "adamw_8bit", "muon")
# of them, those that update every number by itself
ELEMENTWISE = ("adamw", "adamw_8bit", "lion")
USUAL_BETAS = (0.9, 0.999)
USUAL_EPS = 1e-8
LION_BETAS = (0.9, 0.99)


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
            "adamw; adamw_8bit (its moments in 8 bits, by blocks of 256); muon (matrices of layers"
            " by Muon, all else by AdamW), lion, adafactor; or a torch optimizer of your own:"
            " `file.py:Class` or `package.module:Class`."
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
    masters: Literal["float32", "split"] = Field(
        "float32",
        description=(
            "How the float32 master of a bfloat16 weight is kept. float32: beside it, 4 bytes."
            " split: as the weight and the bits that it lacks, 2.1 bytes; every bit of a run stays"
            " as it is. adamw, adamw_8bit and lion."
        ),
    )
    gradients: Literal["float32", "bfloat16"] = Field(
        "float32",
        description=(
            "In what the gradients of bfloat16 weights are added up over micro-batches. bfloat16: 2"
            " bytes a weight less, and one more rounding with every micro-batch. adamw, adamw_8bit"
            " and lion."
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

    @property
    def compact(self) -> bool:
        """Whether something of it is kept in fewer bytes than float32 has."""
        narrow = self.masters == "split" or self.gradients == "bfloat16"
        return narrow or self.name == "adamw_8bit"

    def facts(self) -> dict[str, Any]:
        """Those of `ModelFacts` that it decides."""
        return {
            "optimizer": self.name,
            "offload": self.offload,
            "split": self.masters == "split",
            "narrow": self.gradients == "bfloat16",
        }

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
        if self.compact and self.name not in ELEMENTWISE:
            key = "masters" if self.masters == "split" else "gradients"
            raise ValueError(
                f"{key}: {self.name} needs whole tensors in float32; use {', '.join(ELEMENTWISE)}"
            )
        if self.compact and self.offload:
            raise ValueError("offload: of what is kept in float32; leave one of them out")
        if self.name not in MOMENTS:
            for key, usual in (("betas", USUAL_BETAS), ("eps", USUAL_EPS)):
                if getattr(self, key) != usual:
                    raise ValueError(
                        f"{key}: read by {', '.join(MOMENTS)} only; {self.name} has options"
                    )
        return self
