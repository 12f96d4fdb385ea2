"""The section `teacher`: who is imitated."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from reinforge.config.base import Positive, Section


class OtherTeacherConfig(Section):
    path: str = Field(description="As teacher.path.")
    revision: str | None = Field(None, description="Hub revision.")
    weight: Positive = Field(1.0, description="Of its divergence, relative to the other teachers'.")


class TeacherConfig(Section):
    """The model that is imitated (distillation)."""

    path: str = Field(description="Hub id, local directory, or .gguf file of a causal LM.")
    revision: str | None = Field(None, description="Hub revision (commit, tag or branch).")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Precision of the teachers; auto as for model.dtype."
    )
    weight: Positive = Field(1.0, description="Of its divergence, relative to the other teachers'.")
    also: list[OtherTeacherConfig] = Field(
        [],
        description="Further teachers. The loss is the weighted mean of the divergences to each.",
    )
    precompute: bool = Field(
        False,
        description=(
            "topk: keep the teacher's k likeliest tokens of every position in the run's directory"
            " before the first step, and free the teacher."
        ),
    )
