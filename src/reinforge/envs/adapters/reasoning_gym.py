"""reasoning-gym as an environment: `reasoning_gym:chain_sum`. As data and a reward (`data.source:
reasoning_gym:...`) a task is one question and one answer; here the model may try again after a
wrong answer, and tasks can stand in a mixture of environments.
"""

from __future__ import annotations

import re
from typing import Any

from reinforge.core.env import Action, Observation, Step
from reinforge.core.errors import InputError
from reinforge.core.row import Row
from reinforge.envs.adapters.common import first, library, said
from reinforge.envs.adapters.random_state import RandomState


class ReasoningGymEnv:
    """`attempts`: answers that the model may give; the reward is the task's score of the last one,
    less `cost` for each one before it. `extract`: a regular expression whose group 1 is the answer.
    `task`: keyword arguments of the task. A row with the column `entry` (of `data.source:
    reasoning_gym:...`) is asked that; otherwise the seed makes a question.
    """

    pure = True

    def __init__(
        self,
        id: str,
        *,
        attempts: int = 1,
        cost: float = 0.0,
        extract: str | None = None,
        task: dict[str, Any] | None = None,
    ):
        self.id = id
        self.attempts = attempts
        self.cost = cost
        self.extract = extract
        self.task = task or {}
        self.entry: Any = None
        self.used = 0
        self.prepare(id)

    @staticmethod
    def prepare(id: str, **_: Any) -> None:
        library("reasoning_gym", "reasoning-gym")
        known = library("reasoning_gym.factory", "reasoning-gym").DATASETS
        if id not in known:
            raise InputError(
                f"reasoning-gym has no task {id!r}.",
                where="env.name",
                fix=f"It has: {', '.join(known)[:300]}, ...",
            )

    def reset(self, row: Row, seed: int) -> Observation:
        gym = library("reasoning_gym", "reasoning-gym")
        self.entry = row.columns.get("entry")
        if self.entry is None:
            with RandomState(seed):
                self.entry = gym.create_dataset(self.id, size=1, seed=seed % 2**31, **self.task)[0]
        return first(row, str(self.entry["question"]))

    def step(self, action: Action) -> Step:
        gym = library("reasoning_gym", "reasoning-gym")
        self.used += 1
        text: str | None = action.text.strip()
        if self.extract is not None:
            found = re.findall(self.extract, action.text[-20_000:], re.DOTALL)
            text = found[-1].strip() if found else None
        score = float(
            gym.get_score_answer_fn(self.entry["metadata"]["source_dataset"])(text, self.entry)
        )
        if score >= 1.0 or self.used >= self.attempts or action.last:
            return Step(
                None,
                score - self.cost * (self.used - 1),
                done=True,
                metrics={"solved": float(score >= 1.0), "attempts": self.used},
            )
        return Step(Observation([said("That is not right. Try again.")]))

    def close(self) -> None: ...
