"""The section `rewards`: which rewards, how they add up, and in which processes they run."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, FiniteFloat, model_validator

from reinforge.config.base import Count, Positive, Section


class RewardConfig(Section):
    name: str = Field(
        description="A built-in reward, `file.py:function`, or `package.module:function`."
    )
    weight: FiniteFloat = Field(
        1.0, description="Factor in the total reward. Negative makes it a penalty."
    )
    options: dict[str, Any] = Field({}, description="Keyword arguments of the reward.")
    center: Literal["running"] | None = Field(
        None,
        description=(
            "running: subtract the mean of this reward over all earlier steps. Its metric stays as"
            " scored."
        ),
    )
    scale: Literal["running"] | None = Field(
        None, description="running: divide by the standard deviation over all earlier steps."
    )
    clip: tuple[FiniteFloat, FiniteFloat] | None = Field(
        None, description="[lowest, highest] that it may count, after center and scale."
    )
    gate: str | None = Field(
        None,
        description=(
            "Another reward that must be above 0, or this one counts 0, e.g. format before"
            " correctness."
        ),
    )
    gate_at: FiniteFloat | None = Field(
        None, description="The gate passes at this value or more, instead of above 0."
    )
    kind: Literal["trl", "verl"] | None = Field(
        None,
        description=(
            "The function was written for this library: trl (messages for chats), verl"
            " (compute_score; found by its parameters)."
        ),
    )
    timeout: Positive = Field(
        30.0,
        description=(
            "Seconds for one call; then its process is killed and its samples are unscored,"
            " never 0."
        ),
    )
    workers: Count | None = Field(
        None, description="Processes that compute this reward; default: one per core, up to 4."
    )
    in_process: bool | None = Field(
        None,
        description=(
            "true: call it in the trainer's process, where nothing can stop it. Default: only fast"
            " built-ins, async functions and closures."
        ),
    )
    memory_gib: Positive | None = Field(
        4.0,
        description=(
            "What a process may take beside what importing took; null: no limit, needed if it uses"
            " a GPU."
        ),
    )
    fresh: bool = Field(
        False,
        description=(
            "A new process for every call: nothing that one call did is there for the next."
        ),
    )

    @model_validator(mode="after")
    def _ordered(self) -> RewardConfig:
        if self.clip is not None and self.clip[0] >= self.clip[1]:
            raise ValueError(
                f"clip: {list(self.clip)} leaves nothing between its ends; write [lowest, highest]"
            )
        return self
