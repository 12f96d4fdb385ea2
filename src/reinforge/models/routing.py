"""Which experts the tokens of a mixture go to: what its routers chose, seen and decided from
outside.

Every block of experts scores all E of them for a token, takes the k best with `topk`, and makes the
weights of the chosen ones by a rule of its own. What comes out of that one call is the choice. To
replay one is to put it in the call's place: scores, weights and their gradients are still those of
the block, computed for the experts that were given.

Legend: N tokens, L blocks of experts, E experts of a block, k chosen for a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from reinforge.core.errors import InputError
from reinforge.core.model_facts import ModelFacts
from reinforge.core.routes import OPEN, RoutedLayers
from reinforge.models.packed import PackedModel
from reinforge.models.route_store import RouteShape

KEY = "train.router_replay"
CHOICE = "_choice"  # on a block of experts
TOPK = (torch.topk, Tensor.topk)
SIGMOID = (torch.sigmoid, Tensor.sigmoid, F.sigmoid)


class Replay(StrEnum):
    """What a block does with a choice that it is given."""

    OFF = "off"
    COUNT = "count"  # chooses for itself; how often it would have been another is counted
    ON = "on"
    DIFFERING = "differing"  # takes it where its own are other experts, whatever their order


@dataclass(slots=True)
class BlockChoice:
    """The choice of one block: what it is to be, and what it was in the newest forward."""

    experts: int
    given: Tensor | None = None  # [N, k], OPEN where there is none
    replay: Replay = Replay.OFF
    watched: bool = False
    # of the newest forward:
    own: Tensor | None = None  # [N, k] that the block itself would take
    taken: Tensor | None = None  # [N, k]
    logits: Tensor | None = None  # [N, E] of the experts, with their gradients
    sigmoid: bool = False  # whether a score is the sigmoid of a logit; otherwise their softmax

    @property
    def active(self) -> bool:
        return self.watched or self.given is not None

    def forget(self) -> None:
        """What the newest forward said."""
        self.own = self.taken = self.logits = None

    def probabilities(self) -> Tensor:
        """[N, E] float32: of every expert, for every token."""
        assert self.logits is not None
        logits = self.logits.float()
        if not self.sigmoid:
            return logits.softmax(-1)
        scores = logits.sigmoid()
        return scores / scores.sum(-1, keepdim=True).clamp(min=1e-20)

    def counts(self) -> Tensor:
        """[E] float64: how many assignments every expert got."""
        assert self.taken is not None
        flat = self.taken.reshape(-1)
        ones = torch.ones_like(flat, dtype=torch.float64)
        return ones.new_zeros(self.experts).scatter_add_(0, flat, ones)

    def decide(self, own: Tensor) -> Tensor:
        """The experts to take, where the block would take `own` [N, k]."""
        self.own = own.detach()
        self.taken = self.own
        given = self.given
        if given is None or self.replay is Replay.COUNT:
            return own
        other = given != OPEN
        if self.replay is Replay.DIFFERING:
            other = other & differs(given, own)[:, None]
        self.taken = torch.where(other, given.to(own.dtype), own)
        return self.taken


def differs(a: Tensor, b: Tensor) -> Tensor:
    """[...] whether two choices [..., k] are of different experts; their order does not matter."""
    return (a.sort(-1).values != b.sort(-1).values).any(-1)


class _ChoiceMode(TorchFunctionMode):
    """Inside, the `topk` by which a block chooses gives what `BlockChoice` decides, and what comes
    before it on the way from the hidden states is seen.
    """

    def __init__(self, choice: BlockChoice):
        super().__init__()
        self.choice = choice
        self.open = True  # the choice is still to come

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self.open:
            return out
        if func in TOPK and self._of_experts(args[0]):
            self.open = False
            scores: Tensor = args[0]
            values, own = out
            taken = self.choice.decide(own)
            if taken is not own:
                values = scores.gather(-1, taken)
            return torch.return_types.topk((values, taken))
        if func is F.linear and self._of_experts(out):
            self.choice.logits = out
            self.choice.sigmoid = False
        if func in SIGMOID and self._of_experts(out):
            self.choice.sigmoid = True
        return out

    def _of_experts(self, x: Any) -> bool:
        """Whether it has a number for every token and expert; groups of experts are others."""
        return isinstance(x, Tensor) and x.ndim == 2 and x.shape[-1] == self.choice.experts


@dataclass(frozen=True)
class Routers:
    """The blocks of experts of one model, first layer first. `Routers.of` finds them; the engine
    reads what they chose, the backend gives them what was chosen before.
    """

    model: str  # its class, for errors
    choices: list[BlockChoice]

    @classmethod
    def of(cls, model: PackedModel) -> Routers | None:
        """None: the model has no experts."""
        found = [
            _choice_of(part, ModelFacts.of(model.config).experts)
            for part in model.trunk.modules()
            if holds_experts(part)
        ]
        return cls(type(model.plain).__name__, found) if found else None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, every forward leaves its choices in `taken`."""
        for choice in self.choices:
            choice.watched = True
        try:
            yield
        finally:
            for choice in self.choices:
                choice.watched = False
                choice.forget()

    def give(self, routes: Tensor | None, replay: Replay) -> None:
        """What the next forwards are to choose: [N, L, k], or nothing any more. It holds until the
        next call, since a layer may be computed again in the backward pass.
        """
        if routes is not None and routes.shape[1] != len(self.choices):
            raise InputError(
                f"the samples were routed through {routes.shape[1]} blocks of experts, and"
                f" {self.model} has {len(self.choices)}.",
                where=KEY,
                fix="Set it to off, or generate with the model that is trained.",
            )
        for i, choice in enumerate(self.choices):
            choice.given = None if routes is None else routes[:, i]
            choice.replay = replay
            choice.forget()

    @property
    def seen(self) -> bool:
        """Whether the newest forward told its choices."""
        return all(choice.taken is not None for choice in self.choices)

    def given(self) -> Tensor | None:
        """[N, L, k] that the forwards are to choose; None: nothing."""
        parts = [choice.given for choice in self.choices if choice.given is not None]
        return torch.stack(parts, 1) if parts else None

    def taken(self) -> Tensor:
        """[N, L, k] of the newest forward."""
        return torch.stack([self._seen(choice.taken) for choice in self.choices], 1)

    def own(self) -> Tensor:
        """[N, L, k] that the blocks would have taken by themselves."""
        return torch.stack([self._seen(choice.own) for choice in self.choices], 1)

    def shape(self) -> RouteShape:
        """As the newest forward showed it. Blocks of different kinds would have none in common."""
        kinds = {(len(self._seen(c.taken)[0]), c.experts) for c in self.choices}
        if len(kinds) > 1:
            raise InputError(
                f"the blocks of {self.model} choose among different numbers of experts.",
                where=KEY,
                fix="Set it to off.",
            )
        [(k, experts)] = kinds
        return RouteShape(len(self.choices), k, experts)

    def _seen(self, choice: Tensor | None) -> Tensor:
        if choice is None:
            raise InputError(
                f"{self.model} does not choose its experts by one topk over all of them, so what it"
                " chose is not known.",
                where=KEY,
                fix="Set it to off.",
            )
        return choice


def holds_experts(part: nn.Module) -> bool:
    """Whether it is a block of experts."""
    return "experts" in dict(part.named_children())


def routed_layers(model: PackedModel) -> RoutedLayers:
    """The layers that are blocks of experts, in the order of `Routers.choices`."""
    names = [name for name, part in model.trunk.named_modules() if holds_experts(part)]
    layers = [int(next(word for word in name.split(".") if word.isdigit())) for name in names]
    return RoutedLayers(tuple(layers), ModelFacts.of(model.config).experts)


def tell_choice(block: nn.Module, chosen: Tensor) -> None:
    """Somebody computed the block in its place, and these experts [N, k] were chosen."""
    choice = getattr(block, CHOICE, None)
    if choice is not None and choice.watched:
        choice.own = choice.taken = chosen


def release(module: nn.Module) -> None:
    """Takes from the blocks of a copied module what belongs to the original."""
    for block in module.modules():
        if vars(block).pop(CHOICE, None) is not None:
            vars(block).pop("forward", None)


def _choice_of(block: nn.Module, experts: int) -> BlockChoice:
    """What there is of this block's choice; its forward is wrapped the first time."""
    found = getattr(block, CHOICE, None)
    if found is None:
        own = getattr(block.experts, "num_experts", None)
        found = BlockChoice(own if isinstance(own, int) else experts)
        _wrap(block, found)
        setattr(block, CHOICE, found)
    return cast(BlockChoice, found)


def _wrap(block: nn.Module, choice: BlockChoice) -> None:
    plain = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not choice.active:
            return plain(*args, **kwargs)
        with _ChoiceMode(choice):
            return plain(*args, **kwargs)

    block.forward = forward  # type: ignore[method-assign]
