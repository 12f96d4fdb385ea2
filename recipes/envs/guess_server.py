"""An OpenEnv server for recipes/envs/openenv.yaml: a number between 1 and 8, three guesses, a hint
after each.
"""

from __future__ import annotations

import random
import re
from typing import Any

from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Guess(Action):
    message: str


class Hint(Observation):
    hint: str


class GuessEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Hint:
        self.number = random.Random(seed).randint(1, 8)
        self._state = State(step_count=0)
        return Hint(hint="Guess a number between 1 and 8.")

    def step(self, action: Guess, **_: Any) -> Hint:
        self._state.step_count += 1
        found = re.findall(r"\d", action.message)
        guess = int(found[-1]) if found else 0
        right = guess == self.number
        hint = "right" if right else "higher" if guess < self.number else "lower"
        return Hint(hint=hint, done=right or self._state.step_count >= 3, reward=float(right))

    @property
    def state(self) -> State:
        return self._state


app = create_app(GuessEnvironment, Guess, Hint, env_name="guess", max_concurrent_envs=256)
