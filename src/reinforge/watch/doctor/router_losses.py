"""The losses of a mixture's routers, where they are so large that nothing else counts. Who tells of
a loss that is not finite asks here: a rule of the doctor, and the run when it ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MUCH = 100.0  # what is usual gives less than 1
USUAL = 0.001
LARGE = 0.1  # a coefficient of a balancing loss that is not advised to be raised further
METRICS = {
    "train.router_aux_loss": "train/router_aux_loss",
    "train.router_z_loss": "train/router_z_loss",
}


@dataclass(frozen=True, slots=True)
class HugeLoss:
    """A loss of the routers beside which nothing counts: the key of its coefficient, that, and the
    value that it is multiplied with.
    """

    key: str
    coefficient: float
    value: float

    def __str__(self) -> str:
        """
        >>> str(HugeLoss("train.router_aux_loss", 1e30, 2.0))
        'train.router_aux_loss=1e+30 makes a loss of 2e+30'
        """
        return (
            f"{self.key}={self.coefficient:g} makes a loss of {self.coefficient * self.value:.3g}"
        )

    @property
    def fix(self) -> str:
        return f"Lower {self.key}; {USUAL:g} is usual."


def huge_loss(
    coefficients: Mapping[str, float | None], metrics: Mapping[str, float | None]
) -> HugeLoss | None:
    """The first of them that is. `coefficients`: by their keys. `metrics`: of a step."""
    for key, metric in METRICS.items():
        coefficient = coefficients.get(key) or 0.0
        value = metrics.get(metric) or 0.0
        if coefficient * value > MUCH:
            return HugeLoss(key, coefficient, value)
    return None
