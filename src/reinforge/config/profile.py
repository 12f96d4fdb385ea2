"""The section `train.profile`: which steps are looked at closely."""

from __future__ import annotations

from pydantic import Field

from reinforge.config.base import Count, Natural, Section


class ProfileConfig(Section):
    """A trace of a few steps and a table of what took the time, in the folder profile of the run:
    of the process with the loop (rank 0).
    """

    steps: Count = Field(2, description="How many steps.")
    after: Natural = Field(
        2, description="Steps before them, counted from each start: the first ones are slow."
    )
