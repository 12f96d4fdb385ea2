"""How evenly a mixture uses its experts, from step to step.

A backend tells the share of all assignments that every expert got (`experts/<expert>/<block>/load`,
core/metrics); people want a few numbers of them:

    load_max   the largest share of an expert, times their number: 1 where all get the same
    entropy    of the shares, over its largest value: 1 where all get the same, 0 where one gets all
    dead       share of the experts that got less than a hundredth of an even share
    drift      share of the assignments that went elsewhere than in the update before (total
               variation of the shares)

each the mean over the blocks, but load_max, which is that of the worst one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reinforge.core.backend import State
from reinforge.core.metrics import Metric, Reduction, StepMetrics

PREFIX = "experts/"
LOAD = "/load"
FORGOTTEN = 0.01  # of an even share: an expert that learns nothing any more


class ExpertLoad:
    """Makes numbers for people of the loads of each update; it remembers those of the last one. A
    part of a checkpoint.
    """

    def __init__(self) -> None:
        self.before: Tensor | None = None  # [L, E] float64

    def finish(self, metrics: StepMetrics) -> StepMetrics:
        """The metrics with a few numbers in the place of the loads."""
        found = {name: value for name, value in metrics.items() if _place(name) is None}
        places = {place: value for name, value in metrics.items() if (place := _place(name))}
        if not places:
            return found
        blocks, experts = (1 + max(place[i] for place in places) for i in (0, 1))
        load = torch.zeros(blocks, experts, dtype=torch.float64)
        for place, value in places.items():
            load[place] = float(value)
        load /= load.sum(1, keepdim=True).clamp(min=1e-12)
        found |= {
            "experts/load_max": Metric(float(load.max()) * experts, Reduction.MAX),
            "experts/entropy": Metric(_entropy(load)),
            "experts/dead": Metric(float((load * experts < FORGOTTEN).double().mean())),
        }
        if self.before is not None and self.before.shape == load.shape:
            moved = (load - self.before).abs().sum(1) / 2
            found["experts/drift"] = Metric(float(moved.mean()))
        self.before = load
        return found

    def state(self) -> State:
        return State({} if self.before is None else {"load": self.before})

    def load(self, state: State) -> None:
        self.before = state.tensors.get("load")


def _place(name: str) -> tuple[int, int] | None:
    """The block and the expert whose load a metric is; None: it is another one.

    >>> _place("experts/3/0/load"), _place("experts/entropy")
    ((0, 3), None)
    """
    if not name.startswith(PREFIX) or not name.endswith(LOAD):
        return None
    expert, block = name.removeprefix(PREFIX).removesuffix(LOAD).split("/")
    return int(block), int(expert)


def _entropy(load: Tensor) -> float:
    """Of [L, E] shares, as a part of the largest that there can be; the mean over the blocks."""
    if load.shape[1] == 1:
        return 1.0
    spread = -torch.xlogy(load, load).sum(1)
    return float((spread / torch.log(torch.tensor(float(load.shape[1])))).mean())
