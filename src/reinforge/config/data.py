"""The section `data`: which rows, and how they become prompts."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from reinforge.config.base import Attribute, Count, Natural, Section
from reinforge.config.mixture import MixtureConfig

# those of data/formats/table.py, and what recognises them
FormatName = Literal[
    "auto",
    "verl",
    "openai_pairs",
    "hh",
    "ultrafeedback",
    "sharegpt_pairs",
    "orca_pairs",
    "alpaca_pairs",
    "text_pairs",
    "pairs",
    "steps",
    "kto",
    "alpaca_kto",
    "sharegpt_kto",
    "reasoning",
    "rlvr",
    "capybara",
    "sharegpt",
    "messages",
    "orca",
    "helpsteer",
    "prompt_completion",
    "alpaca",
    "query",
    "prompt",
    "text",
]


class EvalDataConfig(Section):
    source: str | None = Field(
        None,
        description="Default: the training source (rows are then split off and never trained on).",
    )
    size: Natural = Field(
        0, description="Held-out rows; 0 = all of `source`, or none when there is no source."
    )
    options: dict[str, Any] = Field(
        {}, description="Options of the source; default: those of the training source."
    )
    where: dict[str, Any] = Field(
        {}, description="Keep only rows whose columns equal these values."
    )
    fixed: dict[str, str | int | float] = Field(
        {}, description="As data.fixed, for evaluation rows: the attributes that are wanted."
    )


class AttributesConfig(Section):
    names: list[Attribute] = Field(
        min_length=1,
        description="Columns with one number each, in the order in which the prompt has them.",
    )
    turn: Literal["user", "system"] = Field(
        "user",
        description=(
            "Where they stand: at the end of the last turn of the user, or of the system message,"
            " which is made if there is none. With data.template, where it has {attributes}."
        ),
    )
    lowest: int = Field(0, description="Numbers are rounded, and none is below this.")
    highest: int = Field(4, description="... or above this. HelpSteer: 4.")

    @model_validator(mode="after")
    def _ordered(self) -> AttributesConfig:
        if self.lowest >= self.highest:
            raise ValueError(
                f"attributes: nothing is between {self.lowest} and {self.highest}; give lowest and"
                " highest"
            )
        return self


class DataConfig(Section):
    source: str = Field(
        description=(
            "A .jsonl/.json/.parquet/.csv/.txt/.md file, a directory of .txt and .md files, a hub"
            " data set id, `reasoning_gym:<task>`,"
            " `arithmetic:<kind>`, `games:<name>`, or `mixture`."
        )
    )
    mixture: list[MixtureConfig] = Field(
        [], description="With source `mixture`: the sources that are mixed, by their weights."
    )
    split: str = Field("train", description="Split of a hub data set.")
    options: dict[str, Any] = Field(
        {}, description="Options of the source (reasoning_gym: the task's own, plus seed and size)."
    )
    format: FormatName = Field(
        "auto",
        description=(
            "How the columns of a row are read: docs/data.md has the formats. auto: recognised by"
            " the columns, and told."
        ),
    )
    columns: dict[str, str] = Field(
        {}, description="Our name: their name, e.g. {prompt: question, answer: solution}."
    )
    where: dict[str, Any] = Field(
        {}, description="Keep only rows whose columns equal these values."
    )
    system: str | None = Field(None, description="System message put before every prompt.")
    template: str | None = Field(
        None,
        description=(
            "Prompt text with {column} places, e.g. 'Q: {question}\\nA:'. Rounded: {score:.1f}."
        ),
    )
    fixed: dict[str, str | int | float] = Field(
        {},
        description=(
            "Columns with the same value in every row, e.g. {quality: 4}: what the template is to"
            " ask for (SteerLM)."
        ),
    )
    attributes: AttributesConfig | None = Field(
        None,
        description=(
            "Write attributes of the answer into the prompt (SteerLM), e.g. {names: [helpfulness,"
            " verbosity]}: helpfulness:4,verbosity:2. Trained on what rows have, asked for by"
            " data.fixed."
        ),
    )
    chat: Literal["auto", "always", "never"] = Field(
        "auto", description="Render prompts with the chat template. auto: if the tokenizer has one."
    )
    loss_on: Literal["assistant", "completion", "all"] = Field(
        "assistant", description="SFT: which tokens are trained."
    )
    blocks: bool = Field(
        False,
        description=(
            "SFT on whole texts (continued pre-training): join them with EOS between them, and cut"
            " them into blocks of max_length tokens, all of which are trained."
        ),
    )
    bad_rows: Literal["error", "drop"] = Field(
        "error",
        description=(
            "What to do where single rows cannot be used (an empty answer, an unknown role): refuse"
            " the data, or leave these rows out and say which."
        ),
    )
    length: Literal["drop", "truncate", "error"] = Field(
        "drop", description="What to do with rows longer than max_length."
    )
    max_length: Count | None = Field(
        None,
        description=(
            "Longest row in tokens (RL: prompt). Default: what the model and rollout.max_new_tokens"
            " leave."
        ),
    )
    shuffle: bool = Field(
        True, description="Visit rows in a new order every epoch, a function of run.seed."
    )
    limit: Count | None = Field(None, description="Use only the first this many rows.")
    on_disk: Literal["auto", "always", "never"] = Field(
        "auto",
        description=(
            "Keep rows in a temporary file instead of in memory, and tokenise them when they are"
            " trained. auto: files of 1 GiB and more."
        ),
    )
    eval: EvalDataConfig = EvalDataConfig()

    @model_validator(mode="after")
    def _mixture(self) -> DataConfig:
        if (self.source == "mixture") != bool(self.mixture):
            raise ValueError(
                "data.mixture: write `source: mixture` and list the sources under mixture; one"
                " without the other means nothing"
            )
        names = [item.name or item.source for item in self.mixture]
        if len(set(names)) < len(names):
            raise ValueError(
                "data.mixture: two sources have the same name; give them different ones with `name`"
            )
        return self
