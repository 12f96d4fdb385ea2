"""Two models as one to sample from: pi^(1-c) mu^c, token by token, by mixing their logits.

An engine sees a model with twice the layers: the second one's keys and values lie behind the first
one's in the same cache. At c = 1 it is the second model alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from reinforge.models.attention import AttentionLayout
from reinforge.models.attention_rule import AttentionRule
from reinforge.models.causal import CausalModel
from reinforge.models.head import LogitRule

# inside, what it yields computes as the second model
Active = Callable[[], AbstractContextManager[CausalModel]]


@dataclass(slots=True)
class _SecondModelLayout:
    """The same layout for a second model, whose layers are counted on from the first one's."""

    layout: AttentionLayout
    layers: int

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        return self.layout.attend(layer + self.layers, q, k, v, rule)


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
            self.layer_count = len(policy.layers)
            assert len(model.head.weight) == len(policy.head.weight), "two vocabularies"

    def hidden(self, tokens: Tensor, positions: Tensor, layout: AttentionLayout) -> Tensor:
        """[N, E] of the second model, or [N, 2 E] of both."""
        parts = [] if self.coefficient == 1 else [self.policy.hidden(tokens, positions, layout)]
        with self.other() as model:
            parts.append(
                model.hidden(
                    tokens,
                    positions,
                    _SecondModelLayout(layout, self.layer_count) if parts else layout,
                )
            )
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
