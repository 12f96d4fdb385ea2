"""A reward model in an actor of its own.

It keeps nothing between calls, so one that is lost is made again and asked again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from reinforge.cluster.errors import ActorLost
from reinforge.cluster.ray_cluster import RayCluster
from reinforge.cluster.stateless import StatelessActors
from reinforge.cluster.transport import pack
from reinforge.rewards.model import ModelReward

NAME = "reward"


class RemoteReward:
    """A reward model in an actor, as a function that awaits: (prompts, completions) -> scores. Made
    in place of the reward's own function; rollouts call it.
    """

    def __init__(self, cluster: RayCluster, place: int, reward: ModelReward, device: str):
        self.actors = StatelessActors(cluster, NAME, NAME, _load, reward, device, replica=place)
        self.actors.opened()

    async def __call__(self, prompts: Sequence[Any], completions: Sequence[str]) -> Any:
        while True:
            workers = await asyncio.to_thread(self.actors.opened)
            try:
                scores = await workers.ask(
                    "call", NAME, "__call__", pack((None, (list(prompts), list(completions))))
                )
                self.actors.answered()
                return scores
            except ActorLost as lost:
                await asyncio.to_thread(self.actors.replace, workers, lost)


def _load(objects: dict[str, Any], reward: ModelReward, device: str) -> ModelReward:
    return reward.load(device)
