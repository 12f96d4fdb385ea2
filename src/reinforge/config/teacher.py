"""The section `teacher`: who is imitated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from reinforge.config.base import Count, Natural, Positive, Section


class TeacherServerConfig(Section):
    url: str = Field(
        description="Where an OpenAI-compatible server is, usually up to /v1.",
        pattern="^https?://",
    )
    model: str | None = Field(None, description="The model's name there. Default: the only one.")
    api_key_env: str | None = Field(
        None, description="The environment variable with the server's API key."
    )
    parallel: Count = Field(16, description="Requests at once, of every process that trains.")
    retries: Natural = Field(
        6, description="After the first try of a request, with growing pauses: about 20 s for 6."
    )
    timeout: Positive = Field(300.0, description="Seconds that a request may take.")


class OneTeacherConfig(Section):
    path: str | None = Field(
        None, description="Hub id, local directory, or .gguf file of a causal LM."
    )
    revision: str | None = Field(None, description="Hub revision (commit, tag or branch).")
    server: TeacherServerConfig | None = Field(
        None, description="In place of a path: a model behind a server, asked while training."
    )


class OtherTeacherConfig(OneTeacherConfig):
    weight: Positive = Field(1.0, description="Of its divergence, relative to the other teachers'.")


class TeacherConfig(OtherTeacherConfig):
    """The model that is imitated (distillation), or one for each domain of the data."""

    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Precision of the teachers; auto as for model.dtype."
    )
    also: list[OtherTeacherConfig] = Field(
        [],
        description="Further teachers. The loss is the weighted mean of the divergences to each.",
    )
    domains: dict[str, OneTeacherConfig] = Field(
        {},
        description=(
            "In place of a path: teachers by domain, e.g. {math: {path: org/a}, code: {path:"
            " org/b}}. Every row is taught by the teacher of its own domain alone."
        ),
    )
    column: str = Field("domain", description="The column of a row that names its domain.")
    precompute: bool = Field(
        False,
        description=(
            "Keep the teacher's k likeliest tokens of every position in the run's directory"
            " before the first step, and free the teacher (topk, and jsd with a k)."
        ),
    )

    def teachers(self) -> Iterator[tuple[str, OneTeacherConfig]]:
        """All of them, each with its key."""
        if not self.domains:
            yield "teacher", self
        for i, other in enumerate(self.also):
            yield f"teacher.also.{i}", other
        for name, one in self.domains.items():
            yield f"teacher.domains.{name}", one

    def loaded(self) -> list[OneTeacherConfig]:
        """Those that are no servers."""
        return [one for _, one in self.teachers() if one.server is None]

    @property
    def served(self) -> bool:
        """Whether any of them is behind a server."""
        return any(one.server is not None for _, one in self.teachers())
