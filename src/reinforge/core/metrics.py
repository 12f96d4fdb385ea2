"""Metrics are numbers for people, and each knows how several of it become one: those of the
micro-batches and ranks of one optimizer step, and those of the optimizer steps of a training step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor

Metrics = dict[str, float]  # by name, as they are logged


class Reduction(StrEnum):
    """How several numbers of one name become one, over micro-batches, ranks and optimizer steps."""

    # parts of a batch are sums that were divided by the whole batch's counts (`Totals`), so that
    # they add up; optimizer steps are averaged
    MEAN = "mean"
    MAX = "max"
    MIN = "min"


class Metric(float):
    """A number of one optimizer step, and how it is combined with those of others. Backends and
    reports make it; `average` makes one number of several.
    """

    __slots__ = ("reduction",)
    reduction: Reduction

    def __new__(cls, value: float, reduction: Reduction = Reduction.MEAN) -> Metric:
        made = super().__new__(cls, value)
        made.reduction = reduction
        return made

    def __reduce__(self) -> tuple[type[Metric], tuple[float, Reduction]]:
        return Metric, (float(self), self.reduction)


StepMetrics = dict[str, Metric]  # of one optimizer step


@dataclass(frozen=True, slots=True)
class Extreme:
    """The largest or the smallest number of a micro-batch, beside a loss's other metrics."""

    value: Tensor  # [] or, of single samples, [K]
    reduction: Reduction

    @classmethod
    def largest(cls, value: Tensor) -> Extreme:
        return cls(value, Reduction.MAX)

    @classmethod
    def smallest(cls, value: Tensor) -> Extreme:
        return cls(value, Reduction.MIN)


# What a loss measures of one micro-batch: a tensor is its share of the batch's mean.
LossMetrics = dict[str, Tensor | Extreme]


def tensor_of(part: Tensor | Extreme) -> Tensor:
    return part.value if isinstance(part, Extreme) else part


def reduction_of(part: Tensor | Extreme | Metric) -> Reduction:
    return Reduction.MEAN if isinstance(part, Tensor) else part.reduction


def average(steps: Sequence[Mapping[str, Metric]]) -> Metrics:
    """The metrics of several optimizer steps as one: each over the steps that have it.

    >>> first = {"loss": Metric(1.0), "ratio/max": Metric(5.0, Reduction.MAX)}
    >>> second = {"loss": Metric(2.0), "ratio/max": Metric(3.0, Reduction.MAX)}
    >>> average([first, second])
    {'loss': 1.5, 'ratio/max': 5.0}
    """
    found: Metrics = {}
    for name in {name: None for step in steps for name in step}:
        values = [step[name] for step in steps if name in step]
        if values[0].reduction is Reduction.MAX:
            found[name] = float(max(values))
        elif values[0].reduction is Reduction.MIN:
            found[name] = float(min(values))
        else:
            found[name] = sum(values) / len(values)
    return found
