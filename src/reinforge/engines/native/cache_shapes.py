"""How large the keys and values of each layer are, and its states, seen in a forward rather than
guessed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from reinforge.core.errors import InputError
from reinforge.models.attention import KVShape, PackedLayout
from reinforge.models.attention_rule import AttentionRule
from reinforge.models.causal import CausalModel
from reinforge.models.proof import refusing
from reinforge.models.state import PackedStates

OTHER_ENGINE = "Use another engine, another model, or an algorithm that learns from given texts."


@dataclass(slots=True)
class _ShapeProbe:
    """A layout that remembers how large the keys and values of each layer are. The engine sizes its
    cache by it.
    """

    packed: PackedLayout
    shapes: dict[int, KVShape] = field(default_factory=dict)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        if k.shape[1] != v.shape[1]:
            raise InputError(
                f"the native engine cannot generate with this model: layer {layer} has"
                f" {k.shape[1]} heads of keys and {v.shape[1]} of values.",
                where="rollout.engine",
                fix=OTHER_ENGINE,
            )
        if layer in self.shapes:
            raise InputError(
                f"the native engine cannot generate with this model: layer {layer} attends twice,"
                " and the cache holds one set of keys.",
                where="rollout.engine",
                fix=OTHER_ENGINE,
            )
        self.shapes[layer] = KVShape.of(k, v)
        return self.packed.attend(layer, q, k, v, rule)


@torch.no_grad()
def cache_shapes(model: CausalModel, states: PackedStates | None = None) -> list[KVShape]:
    """What each layer's cache holds, seen in a forward of one token rather than guessed from the
    config; nothing of a layer that does not attend. `states`, of a model that keeps state, has seen
    its shapes afterwards.
    """
    device = model.device
    probe = _ShapeProbe(PackedLayout([1], torch.tensor([0, 1], dtype=torch.int32, device=device)))
    with refusing(model.causal):
        model.hidden(
            torch.zeros(1, dtype=torch.int64, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
            probe,
            states,
        )
    if not model.mixers and sorted(probe.shapes) != list(range(len(probe.shapes))):
        raise InputError(
            f"{type(model.causal).__name__} numbers its attention layers {sorted(probe.shapes)}.",
            where="rollout.engine",
            fix=OTHER_ENGINE,
        )
    return [probe.shapes.get(i, KVShape(0, 0, 0)) for i in range(max(probe.shapes, default=0) + 1)]
