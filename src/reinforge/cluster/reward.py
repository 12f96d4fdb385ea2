"""A reward model in an actor of its own.

It keeps nothing between calls, so one that is lost is made again and asked again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from reinforge.cluster.crew import Crew, Lost
from reinforge.cluster.group import Cluster
from reinforge.cluster.parcel import pack
from reinforge.rewards.model import ModelReward

NAME = "reward"


class RemoteReward:
    """A reward function that awaits: (prompts, completions) -> scores."""

    def __init__(self, cluster: Cluster, place: int, reward: ModelReward, device: str):
        self.cluster = cluster
        self.place = place
        self.reward = reward
        self.device = device
        self.crew = self._open()
        self._repair = asyncio.Lock()
        self.failures = 0  # in a row

    def _open(self) -> Crew:
        crew = self.cluster.crew(NAME, self.place)
        crew.make(NAME, _load, self.reward, self.device)
        return crew

    async def __call__(self, prompts: Sequence[Any], completions: Sequence[str]) -> list[float]:
        while True:
            crew = self.crew
            try:
                scores: list[float] = await crew.ask(
                    "call", NAME, "__call__", pack((None, (list(prompts), list(completions))))
                )
                self.failures = 0
                return scores
            except Lost as lost:
                async with self._repair:
                    if self.crew is crew:
                        await self._again(lost)

    async def _again(self, lost: Lost) -> None:
        began = time.monotonic()
        self.cluster.note("actor_lost", role=lost.role, how=lost.how)
        self.failures += 1
        if self.failures > self.cluster.cfg.restarts:
            raise lost
        self.crew.stop()
        self.cluster.crews.pop(self.crew.role, None)
        self.crew = await asyncio.to_thread(self._open)
        self.cluster.note("actor_restored", role=lost.role, seconds=time.monotonic() - began)


def _load(objects: dict[str, Any], reward: ModelReward, device: str) -> ModelReward:
    return reward.load(device)
