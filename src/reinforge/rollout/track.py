"""The token track: what was read and what was sampled, as it becomes a training row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reinforge.core import routes
from reinforge.core.engine import Completion
from reinforge.core.sample import Sample


@dataclass
class TokenTrack:
    """A training row that grows. Every rollout builds its samples with it.

    `give` adds tokens that the model reads (a prompt, an environment's answer), `take` those that
    it sampled. Trained are the sampled ids and nothing else.
    """

    tokens: list[int] = field(default_factory=list)
    # what was sampled here, each with the place of its first token
    turns: list[tuple[int, Completion]] = field(default_factory=list)
    rewards: dict[int, float] = field(default_factory=dict)  # by position
    prompt: int = 0  # tokens before the first turn
    # where the newest turn and all before it went, of a mixture of experts
    routes: Tensor | None = None

    def give(self, ids: Sequence[int]) -> None:
        self.tokens += ids

    def take(self, completion: Completion) -> None:
        self.prompt = self.prompt or len(self.tokens)
        assert len(completion.tokens) == len(completion.logprobs) == len(completion.versions)
        self.turns.append((len(self.tokens), completion))
        self.tokens += completion.tokens
        if completion.routes is not None and len(completion.routes) == len(self.tokens) - 1:
            self.routes = completion.routes  # those of the turns before are in it

    @property
    def sampled(self) -> list[int]:
        """The ids that the model sampled."""
        return [token for _, turn in self.turns for token in turn.tokens]

    def sample(
        self, uid: str, *, group: str, episode: str, reward_weight: float = 1.0, **more: Any
    ) -> Sample:
        """`reward_weight`: of the rewards by position. `more`: other fields of the sample."""
        tokens = np.empty(len(self.tokens), dtype=np.int64)
        trained = np.zeros(len(self.tokens), dtype=np.bool_)
        logprobs = np.zeros(len(self.tokens), dtype=np.float32)
        versions = np.full(len(self.tokens), -1, dtype=np.int32)  # -1 where not sampled
        end = 0  # of the turn before
        for start, turn in self.turns:
            size = len(turn.tokens)
            part = slice(start, start + size)
            sampled = turn.as_arrays()
            tokens[end:start] = self.tokens[end:start]
            tokens[part] = sampled.ids
            trained[part] = True
            logprobs[part] = sampled.logprobs
            # mostly all are the same, and a list takes longer than one number
            same = size and turn.versions.count(turn.versions[0]) == size
            versions[part] = turn.versions[0] if same else turn.versions
            end = start + size
        tokens[end:] = self.tokens[end:]
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
            tokens=torch.from_numpy(tokens),
            trained=torch.from_numpy(trained),
            logprobs=torch.from_numpy(logprobs),
            versions=torch.from_numpy(versions),
            token_rewards=token_rewards,
            **more,
        )
