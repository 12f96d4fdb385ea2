"""The whole configuration: all sections, and the rules that they keep together.

Defaults are what we would choose; `None` means "the algorithm's own". Unknown keys are refused.
Every field has a description: the reference page and the JSON schema are made from here.
"""

from __future__ import annotations

from pydantic import model_validator

from reinforge.config.rules.check import problems
from reinforge.config.sections import Sections


class Config(Sections):
    """One run: a model, an algorithm, data, and for RL the rewards."""

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        for problem in problems(self):
            raise ValueError(str(problem))
        return self
