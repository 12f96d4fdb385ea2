"""The load-balancing loss of a mixture of experts: what keeps its router from sending everything to
a few of them.

    L = E sum over experts e of f_e P_e

f_e: assignments to expert e per token, P_e: the mean of the router's probability of e, both over
all tokens of a forward and all layers together (Switch Transformer, 2101.03961, equations 4 to 6).
It is transformers' own function of the router's logits.

Legend: N tokens of a pack, E experts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from reinforge.core.errors import InputError
from reinforge.models.causal import CausalModel
from reinforge.models.packed import PackedModel

KEY = "train.router_aux_loss"
FORGOTTEN = 0.01  # of an even share: an expert that learns nothing any more
# of transformers' function; that of one architecture has others
ARGUMENTS = ["gate_logits", "num_experts", "top_k"]


@dataclass(frozen=True)
class LoadBalanceLoss:
    """The loss of one model, and its coefficient."""

    model: CausalModel
    coefficient: float
    function: Callable[..., Tensor]  # of logits [N, E] of every layer, E, experts per token

    @classmethod
    def of(cls, model: PackedModel, asked: float | None) -> LoadBalanceLoss | None:
        """`asked` is the coefficient; None: what the model's own config says
        (`output_router_logits`, `router_aux_loss_coef`). With 0 the router is only watched. None
        comes back where there is no such loss. A critic and a reward model have none, as in
        transformers.
        """
        plain = model.plain
        function = getattr(sys.modules[type(plain).__module__], "load_balancing_loss_func", None)
        able = (
            isinstance(model, CausalModel)
            and function is not None
            and list(signature(function).parameters)[:3] == ARGUMENTS
        )
        if asked and not able:
            raise InputError(
                f"{type(plain).__name__} has no load-balancing loss of its router.",
                where=KEY,
                fix=(
                    "Leave it out, or train a mixture-of-experts model that transformers has the"
                    " loss for."
                ),
            )
        wanted = able and getattr(model.config, "output_router_logits", False)
        said = getattr(plain, "router_aux_loss_coef", 0.0) if wanted else 0.0
        coefficient = float(said if asked is None else asked)
        if not able or (not coefficient and model.slices is not None):
            return None
        if model.slices is not None:
            raise InputError(
                "the router's load is that of whole packs, and sequence parallelism cuts them.",
                where=KEY,
                fix="Set it to 0, or train.sequence_parallel=1.",
            )
        assert isinstance(model, CausalModel) and function is not None
        return cls(model, coefficient, function)

    @contextmanager
    def watched(self) -> Iterator[list[Tensor]]:
        """Inside, the router's logits [N, E] of every layer are put into the list that
        is yielded.
        """
        found: list[Tensor] = []

        def ask(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return args, {**kwargs, "output_router_logits": True}

        def keep(_: Any, args: Any, out: Any) -> None:
            found.extend(out.router_logits or ())

        hooks = [
            self.model.trunk.register_forward_pre_hook(ask, with_kwargs=True),
            self.model.trunk.register_forward_hook(keep),
        ]
        try:
            yield found
        finally:
            for hook in hooks:
                hook.remove()

    def dead(self, logits: list[Tensor]) -> Tensor:
        """The share of experts, over all layers, that the router gives less than a hundredth of an
        even share of its probability on average.
        """
        means = torch.stack([each.detach().float().softmax(-1).mean(0) for each in logits])
        return (means * means.shape[-1] < FORGOTTEN).float().mean()

    def loss(self, logits: list[Tensor]) -> Tensor:
        """A number, without the coefficient."""
        plain = self.model.plain
        if not logits:
            raise InputError(
                f"{type(plain).__name__} does not say how it routes its tokens, so their load"
                " cannot be balanced.",
                where=KEY,
                fix="Set it to 0.",
            )
        return self.function(tuple(logits), plain.num_experts, plain.num_experts_per_tok)
