"""One question, one answer: the environment that is none.

What the answer is worth is for the config's rewards to say.
"""

from __future__ import annotations

from reinforge.core.env import Action, Observation, Step
from reinforge.core.row import Row


class SingleTurnEnv:
    """An environment that says the prompt and takes one answer: single-turn training through the
    machinery of episodes.
    """

    pure = True

    async def reset(self, row: Row, seed: int) -> Observation:
        return Observation(messages_of(row))

    async def step(self, action: Action) -> Step:
        return Step(None, done=True)

    async def close(self) -> None: ...


def messages_of(row: Row) -> list[dict[str, object]]:
    """The row's prompt as messages."""
    return (
        [{"role": "user", "content": row.prompt}]
        if isinstance(row.prompt, str)
        else list(row.prompt)
    )
