"""The items of `data.mixture`: several sources in given shares."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from reinforge.config.base import Count, Positive, Section


class MixtureConfig(Section):
    """One source of a mixture. What it does not say is as in the section `data`."""

    source: str = Field(description="As data.source.")
    weight: Positive | None = Field(
        None,
        description=(
            "Its share of the rows drawn, relative to the others'; default: its number of rows."
        ),
    )
    name: str | None = Field(None, description="What its rows are called; default: the source.")
    split: str = Field("train", description="Split of a hub data set.")
    options: dict[str, Any] = Field({}, description="Options of the source.")
    format: str | None = Field(None, description="As data.format.")
    columns: dict[str, str] | None = Field(None, description="Our name: their name.")
    where: dict[str, Any] | None = Field(
        None, description="Keep only rows whose columns equal these values."
    )
    template: str | None = Field(None, description="Prompt text with {column} places.")
    limit: Count | None = Field(None, description="Use only the first this many rows.")
