"""The section `adapter`: train a few matrices beside the weights instead of all weights."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from reinforge.config.base import Count, Positive, Section


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
        "all-linear", description="Module names to adapt."
    )
    path: str | None = Field(None, description="Continue from this saved adapter.")
