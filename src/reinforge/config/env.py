"""The section `env`: what answers the model's turns.

Also written as a name alone, or as a list of several environments.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, FiniteFloat, model_validator

from reinforge.config.base import Count, Positive, Section, spelled_out


class EnvEntryConfig(Section):
    name: str = Field(description="As env.name.")
    weight: Positive = Field(
        1.0,
        description=(
            "Its share of the rows, relative to the others'. A row's column `env` decides"
            " before it."
        ),
    )
    options: dict[str, Any] = Field({}, description="Keyword arguments of the environment.")
    python: str | None = Field(None, description="As env.python.")


class EnvConfig(Section):
    """An environment: the model's turns and the environment's answers become one training row."""

    name: str | None = Field(
        None,
        description=(
            "A built-in environment (single, guess_number, tools, calculator), `library:name`"
            " (textarena, gem, openenv, ...), or `file.py:Class`."
        ),
    )
    python: str | None = Field(
        None,
        description=(
            "Another Python interpreter that runs the environment: for libraries whose pins clash"
            " with these."
        ),
    )
    options: dict[str, Any] = Field({}, description="Keyword arguments of the environment.")
    mix: list[EnvEntryConfig] = Field(
        [],
        description=(
            "Several environments instead of one. A list in place of the section means this."
        ),
    )
    max_turns: Count = Field(8, description="Turns of the model; then the episode ends, truncated.")
    max_tokens: Count | None = Field(
        None,
        description="Tokens of an episode, all turns and answers; default: the model's context.",
    )
    turn_seconds: Positive | None = Field(
        None, description="Time for one answer of the environment. Past it the episode has failed."
    )
    episode_seconds: Positive | None = Field(
        None,
        description=(
            "Time for a whole episode, generation included. Past it the episode has failed."
        ),
    )
    on_error: Literal["unscored", "raise"] = Field(
        "unscored",
        description=(
            "An environment that raises: leave the episode unscored and count it, or stop the run."
        ),
    )
    concurrent: Count = Field(256, description="Episodes that run at the same time.")
    weight: FiniteFloat = Field(
        1.0,
        description="Factor of the environment's own reward (component `env`), per turn and final.",
    )
    compare: str | None = Field(
        None,
        description=(
            "`file.py:function` (row, episodes) -> rewards: sees all episodes of a prompt; adds"
            " `compare`."
        ),
    )
    calls: str = Field(
        "auto", description="How the model writes tool calls. auto: as its chat template does."
    )

    @model_validator(mode="before")
    @classmethod
    def _short(cls, data: Any) -> Any:
        return spelled_out("env", data)

    @model_validator(mode="after")
    def _one_or_many(self) -> EnvConfig:
        if (self.name is None) == (not self.mix):
            raise ValueError("env: give a name, or a list of environments under mix; one of them")
        if self.mix and (self.options or self.python):
            raise ValueError(
                "env.options, env.python: each environment of mix has its own; move them there"
            )
        names = [entry.name.rpartition(":")[2] for entry in self.mix]
        if len(set(names)) < len(names):
            raise ValueError(
                "env.mix: two environments have the same name, so that a row could not say which it"
                " wants"
            )
        return self

    @property
    def entries(self) -> list[EnvEntryConfig]:
        return self.mix or [
            EnvEntryConfig(name=self.name or "", options=self.options, python=self.python)
        ]
