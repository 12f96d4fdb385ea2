"""The token track: what was read and what was sampled, as it becomes a training row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reinforge.core import routes
from reinforge.core.arrays import floats, ints
from reinforge.core.engine import Completion
from reinforge.core.sample import Sample


@dataclass
class TokenTrack:
    """A training row that grows. Every rollout builds its samples with it.

    `give` adds tokens that the model reads (a prompt, an environment's answer), `take` those that
    it sampled. Trained are the sampled ids and nothing else.
    """

    tokens: list[int] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)  # sampled here
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # -1 where not sampled
    rewards: dict[int, float] = field(default_factory=dict)  # by position
    prompt: int = 0  # tokens before the first turn
    # where the newest turn and all before it went, of a mixture of experts
    routes: Tensor | None = None

    def give(self, ids: Sequence[int]) -> None:
        self.tokens += ids
        self.trained += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)

    def take(self, completion: Completion) -> None:
        self.prompt = self.prompt or len(self.tokens)
        self.tokens += completion.tokens
        self.trained += [True] * len(completion.tokens)
        self.logprobs += completion.logprobs
        self.versions += completion.versions
        if completion.routes is not None and len(completion.routes) == len(self.tokens) - 1:
            self.routes = completion.routes  # those of the turns before are in it

    @property
    def sampled(self) -> list[int]:
        """The ids that the model sampled."""
        return [t for t, own in zip(self.tokens, self.trained, strict=True) if own]

    def sample(
        self, uid: str, *, group: str, episode: str, reward_weight: float = 1.0, **more: Any
    ) -> Sample:
        """`reward_weight`: of the rewards by position. `more`: other fields of the sample."""
        token_rewards = None
        if self.rewards:
            token_rewards = torch.zeros(len(self.tokens))
            for position, reward in self.rewards.items():
                token_rewards[position] += reward_weight * reward
        if self.routes is not None:
            more["extras"] = {
                **more.get("extras", {}),
                routes.NAME: routes.padded(self.routes, len(self.tokens)),
            }
        return Sample(
            uid=uid,
            group=group,
            episode=episode,
            tokens=ints(self.tokens),
            trained=torch.from_numpy(np.array(self.trained, dtype=np.bool_)),
            logprobs=floats(self.logprobs),
            versions=ints(self.versions, np.int32),
            token_rewards=token_rewards,
            **more,
        )
