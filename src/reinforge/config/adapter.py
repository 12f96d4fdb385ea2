"""The section `adapter`: train a few matrices beside the weights instead of all weights."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from reinforge.config.base import Count, Fraction, Positive, Section


class AdapterConfig(Section):
    kind: Literal["lora", "rslora", "dora", "qlora"] = Field(
        "lora",
        description=(
            "lora. rslora: scaled by alpha / sqrt(rank). dora: direction and length apart. qlora:"
            " lora on a base in 4 bits (NF4; needs bitsandbytes)."
        ),
    )
    rank: Count = Field(16, description="Rank of the two factors.")
    alpha: Positive | None = Field(
        None, description="Scale is alpha / rank (rslora: / sqrt(rank)); default 2 x rank."
    )
    targets: Literal["all-linear"] | list[str] = Field(
        "all-linear",
        description=(
            "Module names to adapt, or names of the parameters in which weights of experts lie"
            " stacked (gate_up_proj, down_proj). all-linear: without routers."
        ),
    )
    init: Literal["default", "pissa"] = Field(
        "default",
        description=(
            "How a new adapter begins. default: B is 0. pissa: A and B are the largest singular"
            " values and vectors of the weight, which keeps the rest (2404.02948): learns faster."
        ),
    )
    dropout: Fraction = Field(
        0.0,
        description=(
            "Dropout on what the adapter reads, in the forward of the update only: generation,"
            " log-probs and references have none. Not for policy gradients, and not with dora."
        ),
    )
    modules_to_save: list[str] = Field(
        [],
        description=(
            "Modules that are trained whole beside the adapter and saved with it, by the end of"
            " their names, e.g. lm_head, embed_tokens."
        ),
    )
    path: str | None = Field(None, description="Continue from this saved adapter.")

    @model_validator(mode="after")
    def _pissa(self) -> AdapterConfig:
        if self.init == "default":
            return self
        if self.kind not in ("lora", "rslora"):
            raise ValueError(
                f"init: pissa splits plain weights into two products, and cannot with {self.kind};"
                " use lora or rslora, or leave init out"
            )
        if self.path is not None:
            raise ValueError("init: a saved adapter has begun already; leave init or path out")
        return self

    @model_validator(mode="after")
    def _dropout(self) -> AdapterConfig:
        if self.dropout == 1:
            raise ValueError("dropout: 1 leaves nothing of the adapter; use a smaller share")
        if self.dropout and self.kind == "dora":
            raise ValueError("dropout: dora has none; use lora, rslora or qlora, or leave it out")
        return self

    @model_validator(mode="after")
    def _whole_modules(self) -> AdapterConfig:
        if self.modules_to_save and self.path is not None:
            raise ValueError(
                "modules_to_save: a saved adapter has its own; leave modules_to_save or path out"
            )
        if self.modules_to_save and self.init == "pissa":
            raise ValueError(
                "modules_to_save: an adapter of twice the rank, as PiSSA is exported, has none;"
                " leave modules_to_save or init out"
            )
        return self
