"""Games that need nothing but the model."""

from __future__ import annotations

import random
import re

from reinforge.core.env import Action, Observation, Step
from reinforge.core.errors import InputError
from reinforge.core.row import Row

NUMBER = re.compile(r"-?\d+")


class GuessNumber:
    """The model guesses a number between `low` and `high` and hears `higher` or `lower`.

    Reward 1 when it finds it in at most `guesses` guesses, `speed` more for every guess it did not
    need; 0 otherwise. The number is a function of the row's seed, or its column `number`.

    The conversation is the row's prompt, or, where the row's prompt has places, e.g. "between {low}
    and {high}", with these filled in.
    """

    pure = True

    def __init__(
        self,
        low: int = 1,
        high: int = 16,
        guesses: int = 5,
        speed: float = 0.0,
        per_turn: float = 0.0,
    ):
        if low >= high or guesses < 1:
            raise InputError(
                f"low {low}, high {high}, guesses {guesses}: there is nothing to guess.",
                where="env.options",
            )
        self.low = low
        self.high = high
        self.guesses = guesses
        self.speed = speed
        self.per_turn = per_turn
        self.number = 0
        self.used = 0
        self.left = (low, high)  # what the hints leave

    async def reset(self, row: Row, seed: int) -> Observation:
        given = row.columns.get("number")
        self.number = (
            int(given) if given is not None else random.Random(seed).randint(self.low, self.high)
        )
        self.left = (self.low, self.high)
        if not isinstance(row.prompt, str):
            return Observation(list(row.prompt))
        text = row.prompt.replace("{low}", str(self.low)).replace("{high}", str(self.high))
        return Observation([{"role": "user", "content": text}])

    async def step(self, action: Action) -> Step:
        self.used += 1
        found = NUMBER.findall(action.text)
        guess = int(found[-1][:18]) if found else None
        if guess == self.number:
            return Step(
                None,
                1.0 + self.speed * (self.guesses - self.used),
                done=True,
                metrics={"found": 1.0, "guesses": self.used},
            )
        if self.used >= self.guesses or action.last:
            return Step(None, 0.0, done=True, metrics={"found": 0.0})
        if guess is None:
            hint = "write a number"
            sensible = False
        else:
            hint = "higher" if guess < self.number else "lower"
            sensible = self.left[0] <= guess <= self.left[1]
            low, high = self.left
            self.left = (
                (max(low, guess + 1), high) if guess < self.number else (low, min(high, guess - 1))
            )
        reward = self.per_turn if sensible and self.per_turn else None
        return Step(Observation([{"role": "user", "content": hint}]), reward)

    async def close(self) -> None: ...
