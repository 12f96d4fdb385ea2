"""When a group has all its tokens and only its scores are missing: from then on the GPU can do
something else. A rollout says so through its context.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from reinforge.core.env import Rollout, RolloutContext
from reinforge.core.sample import Group, Row


class Countdown:
    """Calls `then` once it was called so many times: for a group that generates in several parts,
    each of which says when it is generated. Rollouts make one for each such group.
    """

    def __init__(self, calls: int, then: Callable[[], None]):
        self.left = calls
        self.then = then

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.then()


async def run_rollout(rollout: Rollout, row: Row, context: RolloutContext) -> Group:
    """The group that the row became.

    `context.generated` is called once, when the rollout says so or has ended.
    """
    generated = Countdown(1, context.generated)
    try:
        return await rollout(row, replace(context, generated=generated))
    finally:
        generated()
