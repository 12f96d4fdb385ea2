"""Two models as one to sample from: pi^(1-c) mu^c, token by token, by mixing their logits.

An engine sees a model with twice the layers: the second one's keys and values lie behind the first
one's in the same cache. At c = 1 it is the second model alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from reinforge.models.attention import AttentionLayout
from reinforge.models.attention_rule import AttentionRule
from reinforge.models.causal import CausalModel
from reinforge.models.head import LogitRule
from reinforge.models.state import Recurrence, StateFlow, StateKey

# inside, what it yields computes as the second model
Active = Callable[[], AbstractContextManager[CausalModel]]


@dataclass(slots=True)
class _SecondModelLayout:
    """The same layout for a second model, whose layers are counted on from the first one's."""

    layout: AttentionLayout
    layers: int

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        return self.layout.attend(layer + self.layers, q, k, v, rule)


@dataclass(slots=True)
class _SecondModelStates:
    """The states of a second model, behind the first one's."""

    states: StateFlow
    layers: int

    def _key(self, key: StateKey) -> StateKey:
        return key[0] + self.layers, key[1], key[2]

    def convolve(
        self,
        key: StateKey,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None = None,
    ) -> Tensor:
        return self.states.convolve(self._key(key), x, weight, bias, activation)

    def scan(self, key: StateKey, rule: Recurrence, parts: Sequence[Tensor]) -> Tensor:
        return self.states.scan(self._key(key), rule, parts)


class ModelMixture(CausalModel):
    """What an engine asks of a model, answered by two.

    `coefficient` c is the second one's share. They must have the same tokens.

    Sampled at temperature T it is softmax(((1-c) z_pi + c z_mu) / T), which is the geometric
    mixture of both at that temperature.
    """

    def __init__(self, policy: CausalModel, other: Active, coefficient: float):
        assert 0 < coefficient <= 1
        self.policy = policy
        self.other = other
        self.coefficient = coefficient
        self.module = policy.module
        self.plain = policy.plain
        self.tokenizer = policy.tokenizer
        self.exact = False
        self.config = policy.config
        self.trunk = policy.trunk
        self.causal = policy.causal
        self.head = policy.head
        self.reach = policy.reach
        self.rule = LogitRule()  # each model's own is applied before they are mixed
        with other() as model:
            self.width = policy.head.weight.shape[1]
            self.layer_count = int(policy.config.num_hidden_layers)
            self.mixers = model.mixers + (0 if coefficient == 1 else policy.mixers)
            assert len(model.head.weight) == len(policy.head.weight), "two vocabularies"

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        layout: AttentionLayout,
        states: StateFlow | None = None,
    ) -> Tensor:
        """[N, E] of the second model, or [N, 2 E] of both."""
        parts = []
        if self.coefficient < 1:
            parts.append(self.policy.hidden(tokens, positions, layout, states))
            layout = _SecondModelLayout(layout, self.layer_count)
            if states is not None:
                states = _SecondModelStates(states, self.layer_count)
        with self.other() as model:
            parts.append(model.hidden(tokens, positions, layout, states))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def project(self, hidden: Tensor) -> Tensor:
        """[B, V] mixed logits, float32."""
        with self.other() as model:
            theirs = model.logits(hidden[:, -self.width :])
        if self.coefficient == 1:
            return theirs
        return (1 - self.coefficient) * self.policy.logits(
            hidden[:, : self.width]
        ) + self.coefficient * theirs
