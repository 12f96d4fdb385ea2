"""The record that everything else passes around.

A `Sample` is one training row: flat tokens with aligned streams. There is no prompt/completion
split; a multi-turn episode is only more tokens. Position t of every stream speaks about token t:
`logprobs[t]` is log p(tokens[t] | tokens[:t]).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reinforge.core.arrays import ints
from reinforge.core.html import SampleLine, sample_table
from reinforge.core.row import Row as Row
from reinforge.core.row import Stop as Stop
from reinforge.core.row import prompt_text


@dataclass(frozen=True, slots=True)
class Sample:
    """One training row.

    >>> # prompt "2+2=" is ids [5, 6, 5, 7]; the policy sampled "4" (id 8) and eos (id 0)
    >>> # tokens  [5, 6, 5, 7, 8, 0]
    >>> # trained [0, 0, 0, 0, 1, 1]
    >>> # logprobs[0, 0, 0, 0, -0.1, -0.02]
    """

    uid: str  # stable across resume
    group: str  # samples of one prompt share it; statistics never cross it, whatever the order
    # rows forked from one episode share it and count once in group statistics and sequence means
    episode: str
    tokens: Tensor  # [T] int64: exactly the ids the engine saw and sampled, never re-tokenised text
    # [T] bool: sampled by the policy (not prompt, not tool output); never True at position 0
    trained: Tensor
    # [T] float32: behaviour log-probs, post-temperature, over the full vocabulary or over what a
    # constraint allowed; 0 where not trained
    logprobs: Tensor
    versions: Tensor  # [T] int32: which weights sampled this token; -1 where not sampled
    # by component; None = could not be scored
    rewards: dict[str, float | None] = field(default_factory=dict)
    # the weighted total; None = unscored: left out of statistics and of training
    reward: float | None = None
    token_rewards: Tensor | None = None  # [T] float32: per turn, per step, distillation
    # reward of the greedy rollout of the same prompt, for remax; None = there is none
    baseline: float | None = None
    stop: Stop = Stop.EOS
    # [T] each: old, reference, teacher, values, advantages
    streams: dict[str, Tensor] = field(default_factory=dict)
    # what else belongs to it: the experts that its tokens went to (core/routes.py)
    extras: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        length = self.tokens.shape[0]
        for name in ("trained", "logprobs", "versions"):
            if getattr(self, name).shape != (length,):
                raise ValueError(
                    f"sample {self.uid}: {name} has shape {tuple(getattr(self, name).shape)}, not"
                    f" ({length},)"
                )
        if length and self.trained.numpy()[0]:
            raise ValueError(
                f"sample {self.uid}: the first token has no context and cannot be trained"
            )

    def with_(self, **changes: Any) -> Sample:
        """The same with other values of some fields."""
        return replace(self, **changes)

    @property
    def n_trained(self) -> int:
        """How many tokens are trained."""
        return int(np.count_nonzero(self.trained.numpy()))  # in a tenth of the time of a torch call

    @classmethod
    def from_tokens(
        cls,
        uid: str,
        tokens: list[int],
        trained: list[bool],
        *,
        group: str | None = None,
        **kw: Any,
    ) -> Sample:
        """A row that no engine sampled (SFT, preference data): behaviour log-probs are 0 and
        versions -1.
        """
        n = len(tokens)
        mask = torch.tensor(trained, dtype=torch.bool)
        if n:
            mask[0] = False
        return cls(
            uid=uid,
            group=group or uid,
            episode=uid,
            tokens=ints(tokens),
            trained=mask,
            logprobs=torch.zeros(n),
            versions=torch.full((n,), -1, dtype=torch.int32),
            **kw,
        )


@dataclass(frozen=True, slots=True)
class Group:
    """All samples of one prompt. A rollout makes it; advantages compare inside of it. The text is
    for people and logs; training reads tokens.
    """

    row: Row
    samples: list[Sample]
    texts: list[str] = field(default_factory=list)  # one completion text per sample
    extra_tokens: int = 0  # sampled beside the samples and never trained (a greedy baseline)
    # what went wrong, by kind: core/faults.py
    faults: Mapping[str, int] = field(default_factory=dict)
    # means over its episodes of what an environment reports
    metrics: Mapping[str, float] = field(default_factory=dict)
    # the data's own answer, where the algorithm trains on it too (self-play)
    given: Sample | None = None
    # whole conversations by episode, for people
    transcripts: Mapping[str, list[dict[str, Any]]] = field(default_factory=dict)
    # of the faults: what was said about the first of a kind
    why: Mapping[str, str] = field(default_factory=dict)

    @property
    def episodes(self) -> list[Sample]:
        """One row of each episode: rows forked from one episode count once."""
        return list({s.episode: s for s in reversed(self.samples)}.values())[::-1]

    def lines(self) -> list[SampleLine]:
        """Its samples to read: prompt, answer, reward, why it ended and how many tokens."""
        prompt = prompt_text(self.row.prompt)
        return [
            (prompt, text or "", sample.reward, str(sample.stop), sample.n_trained)
            for sample, text in zip_longest(self.samples, self.texts[: len(self.samples)])
        ]

    def _repr_html_(self) -> str:
        """What a notebook shows of it."""
        return sample_table(self.lines())
