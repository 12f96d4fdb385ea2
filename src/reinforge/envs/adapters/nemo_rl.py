"""Environment classes as NeMo-RL has them: `nemo_rl:file.py:Class`. `step(message_logs, metadata)`
gets a batch, here of one, and returns observations, metadata, next_stop_strings, rewards,
terminateds and perhaps answers, one of each.

The metadata of an episode is the row's column `metadata` or `extra_env_info`, or else all of its
columns.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

from reinforge.core.env import Action, Message, Observation, Step
from reinforge.core.errors import InputError
from reinforge.core.row import Row
from reinforge.envs.adapters.common import number, row_messages
from reinforge.rewards.load import load_function


class NemoRlEnv:
    """`cfg`: the one argument of the class, where it takes one.

    A class that is a Ray actor is used without Ray.
    """

    def __init__(self, id: str, *, cfg: dict[str, Any] | None = None):
        made = load_function(id, "env.name")
        # under @ray.remote
        made = getattr(getattr(made, "__ray_metadata__", None), "modified_class", made)
        self.env: Any = made() if cfg is None else made(cfg)
        self.log: list[Message] = []
        self.metadata: Any = None

    async def reset(self, row: Row, seed: int) -> Observation:
        self.log = row_messages(row)
        found = next(
            (
                row.columns[name]
                for name in ("metadata", "extra_env_info")
                if row.columns.get(name) is not None
            ),
            dict(row.columns),
        )
        self.metadata = copy.deepcopy(found)
        return Observation(list(self.log))

    async def step(self, action: Action) -> Step:
        self.log = [*self.log, {"role": "assistant", "content": action.text}]
        result = self.env.step([self.log], [self.metadata])
        if inspect.isawaitable(result):
            result = await result
        observations, metadata, stops, rewards, ended = tuple(result)[:5]
        if stops is not None and stops[0]:
            raise InputError(
                f"asks for the stop strings {stops[0]} in one turn.",
                where="env",
                fix="Set rollout.stop for all turns, and return None here.",
            )
        self.metadata = metadata[0]
        heard = {
            "role": observations[0].get("role") or "user",
            "content": observations[0]["content"],
        }
        # a role that chat templates do not have
        heard["role"] = "user" if heard["role"] == "environment" else heard["role"]
        self.log = [*self.log, heard]
        worth = number(rewards[0], "the reward")
        done = bool(ended[0])
        return Step(None if done else Observation([heard]), worth, done=done)

    async def close(self) -> None:
        if hasattr(self.env, "shutdown"):
            self.env.shutdown()
