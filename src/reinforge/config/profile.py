"""The section `train.profile`: which steps are looked at closely."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from reinforge.config.base import Count, Natural, Section


class ProfileConfig(Section):
    """A few steps looked at closely, in the folder profile of the run: of the process with the loop
    (rank 0).
    """

    steps: Count = Field(2, description="How many steps.")
    after: Natural = Field(
        2, description="Steps before them, counted from each start: the first ones are slow."
    )
    tool: Literal["torch", "nsys"] = Field(
        "torch",
        description=(
            "torch: a trace and a table. nsys: ranges for NVIDIA Nsight Systems, under"
            " `nsys profile --capture-range=cudaProfilerApi reinforge train CONFIG`."
        ),
    )
    memory: bool = Field(
        False,
        description=(
            "Also the history of the GPU's memory, with the lines of code that took it"
            " (pytorch.org/memory_viz draws it)."
        ),
    )
