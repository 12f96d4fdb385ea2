"""The section `ptx`: pre-training text that is trained beside everything else."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from reinforge.config.base import Count, Positive, Section
from reinforge.config.data import DataConfig


class PTXConfig(Section):
    """Pre-training text in every optimizer step (InstructGPT's PPO-ptx), so that the model does not
    forget what it knew.
    """

    source: str = Field(description="Whole texts, as data.source.")
    coefficient: Positive = Field(
        1.0,
        description=(
            "What the mean negative log-likelihood of its tokens is multiplied with before it is"
            " added to the loss."
        ),
    )
    blocks: Count = Field(8, description="Blocks of text in every optimizer step.")
    max_length: Count = Field(
        1024, description="Tokens of a block; at most the model's context is taken."
    )
    split: str = Field("train", description="Split of a hub data set.")
    options: dict[str, Any] = Field({}, description="Options of the source.")
    columns: dict[str, str] = Field({}, description="Our name: their name, e.g. {text: body}.")
    where: dict[str, Any] = Field(
        {}, description="Keep only rows whose columns equal these values."
    )
    limit: Count | None = Field(None, description="Use only the first this many texts.")

    def data(self, context: int) -> DataConfig:
        """The same as a section `data`."""
        return DataConfig(
            source=self.source,
            split=self.split,
            options=self.options,
            columns=self.columns,
            where=self.where,
            limit=self.limit,
            max_length=min(self.max_length, context),
            format="text",
            blocks=True,
        )
