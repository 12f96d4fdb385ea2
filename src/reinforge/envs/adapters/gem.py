"""GEM (gem-llm): `gem:game:GuessTheNumber-v0-easy`, `gem:rg:...`. Its rewards per turn become token
rewards.
"""

from __future__ import annotations

from typing import Any

from reinforge.core.env import Action, Observation, Step
from reinforge.core.errors import InputError
from reinforge.core.row import Row
from reinforge.envs.adapters.common import first, library, number, numbers, said
from reinforge.envs.adapters.random_state import RandomState


class GemEnv:
    """`game`: keyword arguments of the environment.

    `boxed`: a turn without \\boxed{} is put into one as a whole. Its prefix and suffix are written
    around what it says after each turn.
    """

    def __init__(self, id: str, *, game: dict[str, Any] | None = None, boxed: bool = False):
        self.id = id
        self.game = game or {}
        self.boxed = boxed
        self.env: Any = None
        self.chance = RandomState(0)
        self.prepare(id)

    @staticmethod
    def prepare(id: str, **_: Any) -> None:
        library("gem", "gem-llm")
        known = library("gem.envs.registration", "gem-llm").ENV_REGISTRY
        if id not in known:
            near = [name for name in known if id.partition(":")[2].lower() in name.lower()]
            raise InputError(
                f"gem has no environment {id!r}.",
                where="env.name",
                fix=f"It has: {', '.join(near or known)[:300]}.",
            )

    def reset(self, row: Row, seed: int) -> Observation:
        gem = library("gem", "gem-llm")
        self.chance = RandomState(seed)
        with self.chance:
            self.env = gem.make(self.id, **self.game)
            text, _ = self.env.reset(seed=seed % 2**32)
        return first(row, str(text))

    def step(self, action: Action) -> Step:
        said_by_model = (
            action.text
            if not self.boxed or "\\boxed" in action.text
            else f"\\boxed{{{action.text.strip()}}}"
        )
        with self.chance:
            text, reward, terminated, truncated, info = self.env.step(said_by_model)
        done = bool(terminated or truncated)
        worth = number(reward, "the environment's reward")
        if done:
            return Step(
                None,
                worth,
                done=True,
                truncated=bool(truncated and not terminated),
                metrics=numbers(info),
            )
        parts = [info.get("prefix"), str(text), info.get("suffix")]
        return Step(
            Observation([said("\n".join(p for p in parts if p))]), worth, metrics=numbers(info)
        )

    def close(self) -> None:
        self.env = None
