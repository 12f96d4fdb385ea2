"""What a trial and its sweep say to each other: evaluations one way, verdicts and an end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

# hears the step of an evaluation, the steps of the run and the metrics; says why the run is to
# end, if it is
Judge = Callable[[int, int, dict[str, float]], str | None]


@dataclass(frozen=True)
class TrialEnd:
    """How the run of a trial ended. Whoever ran it makes it, the sweep tells the study."""

    kind: Literal["finished", "failed", "terminated"]
    steps: int = 0
    metrics: dict[str, float] = field(default_factory=dict)  # the newest value of each
    error: str | None = None
