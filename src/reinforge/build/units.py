"""What a row of the data becomes, by the algorithm.

Of its own, because `plan` asks and builds no trainer.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from reinforge.algorithms.algorithm import Algorithm
from reinforge.algorithms.losses.attributes import AttributeLoss
from reinforge.algorithms.losses.preference import PairLoss
from reinforge.algorithms.losses.reward_model import RewardLoss
from reinforge.data import units as kinds
from reinforge.data.units import Units


def units_of(algorithm: Algorithm) -> Units:
    """What a row of the data becomes for this algorithm."""
    loss: Any = algorithm.loss
    if isinstance(loss, RewardLoss):
        if loss.row.per == "pair":
            return partial(kinds.compared, gap=loss.row.stream == "gap")
        return kinds.graded if loss.row.per == "answer" else kinds.steps
    if isinstance(loss, AttributeLoss):
        return partial(kinds.attributed, targets=loss.targets)
    if algorithm.family == "preference":
        if not isinstance(loss, PairLoss):
            return kinds.judged
        return partial(kinds.pairs, scores=any(row.takes == "gap" for row in loss.rows.values()))
    return kinds.texts
