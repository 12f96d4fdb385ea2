"""The section `agent`: a program that uses the OpenAI API, trained as it is.

Also written as `file.py:function` alone, or as the list of words of a command.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, FiniteFloat, model_validator

from reinforge.config.base import Count, Positive, Section, spelled_out


class AgentConfig(Section):
    """An agent program: it talks to an OpenAI endpoint, and what the model answered becomes
    training rows.
    """

    name: str | None = Field(
        None,
        description=(
            "`file.py:function` or `package.module:function`, called as (client, row) -> reward."
        ),
    )
    command: list[str] | None = Field(
        None,
        description=(
            "Instead of name: a program of its own, e.g. [python, agent.py]. Row on stdin, reward"
            " in the last line of stdout."
        ),
    )
    max_calls: Count = Field(
        64, description="Answers of the model in one episode; further requests are refused."
    )
    max_tokens: Count | None = Field(
        None,
        description=(
            "Tokens of one conversation, prompts and answers; default: the model's context."
        ),
    )
    seconds: Positive | None = Field(
        600.0, description="Time for a whole episode. Past it the episode has failed. null: none."
    )
    concurrent: Count = Field(64, description="Agents that run at the same time.")
    on_error: Literal["unscored", "raise"] = Field(
        "unscored",
        description=(
            "An agent that raises or crashes: leave the episode unscored and count it, or stop the"
            " run."
        ),
    )
    weight: FiniteFloat = Field(
        1.0, description="Factor of the reward that the agent returns (component `agent`)."
    )
    temperature: Literal["override", "refuse"] = Field(
        "override",
        description=(
            "A request with another temperature than rollout.temperature: answer with ours and"
            " count it, or refuse it."
        ),
    )
    lockstep: bool = Field(
        False,
        description=(
            "Agents get their answers in waves, so that equal runs have equal batches. Not needed"
            " with model.exact."
        ),
    )
    calls: str = Field(
        "auto", description="How the model writes tool calls. auto: as its chat template does."
    )

    @model_validator(mode="before")
    @classmethod
    def _short(cls, data: Any) -> Any:
        return spelled_out("agent", data)

    @model_validator(mode="after")
    def _one(self) -> AgentConfig:
        if (self.name is None) == (not self.command):
            raise ValueError("agent: give a name (file.py:function) or a command; one of them")
        if self.name is not None and ":" not in self.name:
            raise ValueError(
                f"agent.name: {self.name} names no function; write file.py:function or"
                " package.module:function"
            )
        return self
