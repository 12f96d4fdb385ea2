"""What an environment is, and what a rollout is. Environments, agents and foreign libraries all become a `Rollout`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from reinforge.core.sample import Group, Row


@dataclass(frozen=True, slots=True)
class Observation:
    messages: list[dict[str, Any]]  # new messages only: what was said before is never tokenised again


@dataclass(frozen=True, slots=True)
class Action:
    text: str
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Step:
    observation: Observation | None
    reward: float | None = None
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


class Env(Protocol):
    async def reset(self, row: Row) -> Observation: ...

    async def step(self, action: Action) -> Step: ...

    async def close(self) -> None: ...


Rollout = Callable[[Row, str], Awaitable[Group]]  # (row, group id) -> the group of samples it became
