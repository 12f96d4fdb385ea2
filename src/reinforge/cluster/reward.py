"""A reward model in an actor of its own.

It keeps nothing between calls, so one that is lost is made again and asked again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from reinforge.cluster.errors import ActorLost
from reinforge.cluster.ray_cluster import RayCluster
from reinforge.cluster.transport import pack
from reinforge.cluster.worker_group import WorkerGroup
from reinforge.rewards.model import ModelReward

NAME = "reward"


class RemoteReward:
    """A reward model in an actor, as a function that awaits: (prompts, completions) -> scores. Made
    in place of the reward's own function; rollouts call it.
    """

    def __init__(self, cluster: RayCluster, place: int, reward: ModelReward, device: str):
        self.cluster = cluster
        self.place = place
        self.reward = reward
        self.device = device
        self.workers = self._open()
        self._repair = asyncio.Lock()
        self.failures = 0  # in a row

    def _open(self) -> WorkerGroup:
        workers = self.cluster.workers(NAME, self.place)
        workers.make(NAME, _load, self.reward, self.device)
        return workers

    async def __call__(self, prompts: Sequence[Any], completions: Sequence[str]) -> Any:
        while True:
            workers = self.workers
            try:
                scores = await workers.ask(
                    "call", NAME, "__call__", pack((None, (list(prompts), list(completions))))
                )
                self.failures = 0
                return scores
            except ActorLost as lost:
                async with self._repair:
                    if self.workers is workers:
                        await self._recover(lost)

    async def _recover(self, lost: ActorLost) -> None:
        began = time.monotonic()
        self.cluster.note("actor_lost", role=lost.role, how=lost.how)
        self.failures += 1
        if self.failures > self.cluster.cfg.restarts:
            raise lost
        self.workers.stop()
        self.cluster.worker_groups.pop(self.workers.role, None)
        self.workers = await asyncio.to_thread(self._open)
        self.cluster.note("actor_restored", role=lost.role, seconds=time.monotonic() - began)


def _load(objects: dict[str, Any], reward: ModelReward, device: str) -> ModelReward:
    return reward.load(device)
