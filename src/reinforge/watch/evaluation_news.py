"""Which evaluations a view has not heard of: a run tells the newest value of every metric with each
step, those of an earlier evaluation too. And what is told of one that could score nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

EVALUATED = "eval/"  # how the names of their metrics begin
NOTHING_SCORED = "nothing could be scored"  # in place of an accuracy of no answers


def scored_nothing(metrics: Mapping[str, float]) -> bool:
    """Whether no reward said anything about any answer of the newest evaluation."""
    return metrics.get("eval/n") == 0


class EvaluationNews:
    """What is new in the metrics of a step. A view has one, and asks it with every step."""

    def __init__(self) -> None:
        self._newest: dict[str, float] = {}
        self._step: int | None = None
        self._first = 0

    def begin(self, first_step: int) -> None:
        """`first_step`: steps that an earlier part of the run has done."""
        self._first = first_step

    def news(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """The metrics, without those of an evaluation that was told already."""
        found = {key: value for key, value in metrics.items() if key.startswith(EVALUATED)}
        if self._first and self._step is None and step == self._first + 1:
            self._newest = found  # of the part of the run before this one
        # a step that is told twice was evaluated
        new = found != self._newest or step == self._step
        self._newest = found
        self._step = step
        return {key: value for key, value in metrics.items() if new or key not in found}
