"""The section `sampling`: which prompts a step spends its tokens on.

Everything is off by default.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, model_validator

from reinforge.config.base import Count, Fraction, Section


class CurriculumConfig(Section):
    """Easy rows first, in RL and on given rows: the allowed quantile of difficulty grows linearly
    from start to end in the first steps.
    """

    column: str | None = Field(
        None, description="The rows' difficulty, a number. Without it: 1 - the estimated pass rate."
    )
    length: bool = Field(
        False,
        description=(
            "Difficulty is the number of tokens of the row (RL: of its prompt): short ones first."
        ),
    )
    start: Fraction = Field(
        0.0,
        description=(
            "The quantile in the first step. As many rows as a step needs are always allowed."
        ),
    )
    end: Fraction = Field(1.0, description="The quantile at the end of the ramp.")
    steps: Count = Field(description="Length of the ramp in steps.")

    @model_validator(mode="after")
    def _grows(self) -> CurriculumConfig:
        if self.start > self.end:
            raise ValueError(f"sampling.curriculum: start {self.start} is above end {self.end}")
        if self.length and self.column is not None:
            raise ValueError("sampling.curriculum: difficulty is the length or a column, not both")
        return self


class ReplayConfig(Section):
    """Groups whose rewards differed most are trained on again.

    They are off-policy, so the loss needs a ratio or a correction.
    """

    size: Count = Field(256, description="Groups kept.")
    share: Annotated[FiniteFloat, Field(gt=0, lt=1)] = Field(
        0.25, description="Largest share of prompts_per_step that is replayed."
    )
    max_staleness: Count = Field(8, description="Optimizer steps after which a group is too old.")
    max_uses: Count = Field(1, description="How often a group is replayed at most.")


class SamplingConfig(Section):
    """Which prompts a step takes, and what becomes of rollouts that are slow or worth a second
    look.
    """

    pass_rates: bool = Field(
        False,
        description=(
            "Keep every prompt's pass rate and report it. `prefer` and a learned curriculum do so"
            " anyway."
        ),
    )
    prefer: Literal["any", "teachable"] = Field(
        "any",
        description=(
            "teachable: a known row is taken with probability 4p(1-p) of its pass rate p, a solved"
            " or hopeless one with `recheck`; rows that are passed over come again in the next"
            " epoch."
        ),
    )
    retire_above: Fraction = Field(
        0.95, description="Rows with at least this pass rate count as solved."
    )
    hopeless_below: Fraction = Field(
        0.0, description="Rows with at most this pass rate count as hopeless for now."
    )
    min_attempts: Count = Field(
        8, description="Scored samples before a row counts as known. Unknown rows are always taken."
    )
    recheck: Fraction = Field(
        0.05,
        description=(
            "The least probability of a known row: solved and hopeless ones are tried again this"
            " often."
        ),
    )
    decay: Fraction = Field(
        0.5,
        description=(
            "What earlier visits of a row still count for its pass rate at each new one; 0: only"
            " the newest."
        ),
    )
    success_at: FiniteFloat | None = Field(
        None,
        description=(
            "A sample with at least this total reward is a success. Without it: the reward as a"
            " share of the best possible."
        ),
    )
    curriculum: CurriculumConfig | None = None
    over_provision: Annotated[FiniteFloat, Field(ge=1, le=16)] = Field(
        1.0,
        description=(
            "Prompts submitted for each one needed: the first complete groups are taken, the rest"
            " cancelled. Saves waiting for the longest answers, and so prefers short ones."
        ),
    )
    replay: ReplayConfig | None = None

    @model_validator(mode="after")
    def _bands(self) -> SamplingConfig:
        if self.hopeless_below >= self.retire_above:
            raise ValueError(
                f"sampling: hopeless_below {self.hopeless_below} must be below retire_above"
                f" {self.retire_above}, or no row is teachable"
            )
        return self

    @property
    def tracks(self) -> bool:
        """Whether pass rates are kept."""
        learned = (
            self.curriculum is not None
            and self.curriculum.column is None
            and not self.curriculum.length
        )
        return self.pass_rates or self.prefer == "teachable" or learned
