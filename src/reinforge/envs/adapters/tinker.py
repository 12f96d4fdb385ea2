"""Environment classes as tinker-cookbook has them: `tinker:file.py:make`. They speak tokens:
`initial_observation()` gives the ids of the first prompt, `step(ids)` takes the ids that were
sampled and gives the ids of the next one. Nothing is tokenised or templated here; where a prompt
goes on from what was said, it stays one training row, otherwise the next row begins.

`make(row, **options)` returns an environment. The environment needs the tokenizer of the model that
is trained.
"""

from __future__ import annotations

import inspect
from typing import Any

from reinforge.core.env import Action, Observation, Step
from reinforge.core.row import Row
from reinforge.envs.adapters.common import number, numbers
from reinforge.rewards.load import load_function


class TinkerEnv:
    """`make`: keyword arguments.

    Stop conditions are the run's (the end of a turn, rollout.stop), not the environment's.
    """

    def __init__(self, id: str, *, make: dict[str, Any] | None = None):
        self.function = load_function(id, "env.name")
        self.make = make or {}
        self.env: Any = None

    async def reset(self, row: Row, seed: int) -> Observation:
        wanted = inspect.signature(self.function).parameters
        extra = {"seed": seed} if "seed" in wanted else {}
        made = self.function(row, **extra, **self.make)
        self.env = await made if inspect.isawaitable(made) else made
        opening = await self.env.initial_observation()
        if not isinstance(opening, tuple):
            raise ValueError(f"the environment has no first prompt, but a {type(opening).__name__}")
        return Observation([], tokens=ids_of(opening[0]))

    async def step(self, action: Action) -> Step:
        result = await self.env.step(list(action.tokens))
        done = bool(result.episode_done)
        observation = None if done else Observation([], tokens=ids_of(result.next_observation))
        return Step(
            observation,
            number(result.reward, "the reward"),
            done=done,
            metrics=numbers(result.metrics),
        )

    async def close(self) -> None: ...


def ids_of(prompt: Any) -> list[int]:
    """The ids of a ModelInput, or of a list of ids."""
    return [int(i) for i in (prompt.to_ints() if hasattr(prompt, "to_ints") else prompt)]
