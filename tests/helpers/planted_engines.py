"""Engines that do not compute what the trainer computes: a copy of the policy with one difference
planted, as servers have them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch

from reinforge.build import engines
from reinforge.build.inputs import ModelInputs
from reinforge.build.policy import load_policy
from reinforge.core.engine import Completion, Sampling
from reinforge.core.weights import Weights
from reinforge.engines.native import NativeEngine
from reinforge.models.causal import CausalModel


@dataclass(frozen=True)
class Plant:
    """What an engine does differently from the trainer."""

    dtype: str | None = None  # of its copy
    temperature: float | None = None  # that it samples with, whatever the request says
    bos: bool = False  # it puts a BOS before every prompt
    behind: int = 0  # updates that its weights are behind
    left_out: str = ""  # parameters with this in their name never arrive
    router_bits: int | None = None  # mantissa bits of the routers' weights
    rounded: str = ""  # parameters with this in their name have 4 of them


class PlantedEngine(NativeEngine):
    """The native engine on a copy of the policy, which `update` fills."""

    def __init__(self, plant: Plant, model: CausalModel, **settings: Any):
        super().__init__(model, **settings)
        self.plant = plant
        self.past: list[dict[str, torch.Tensor]] = []

    async def generate(
        self, tokens: Sequence[int], params: Sampling, *, key: int, n: int = 1, **more: Any
    ) -> list[Completion]:
        plant = self.plant
        if plant.temperature is not None:
            params = replace(params, temperature=plant.temperature)
        given = [self.model.tokenizer.bos_token_id, *tokens] if plant.bos else list(tokens)
        found = await super().generate(given, params, key=key, n=n, **more)
        if plant.bos:
            found = [_without_first_route(one) for one in found]
        return found

    async def update(self, weights: Weights, version: int) -> None:
        assert weights.module is not None
        sent = {n: p.detach().clone() for n, p in weights.module.named_parameters()}
        self.past = [*self.past, sent][-1 - self.plant.behind :]
        self._fill(self.past[0], version)
        await super().update(Weights("shared", module=self.model.module), version)

    @torch.no_grad()
    def _fill(self, weights: dict[str, torch.Tensor], version: int) -> None:
        own = dict(self.model.module.named_parameters())
        for name, tensor in weights.items():
            if self.plant.left_out and self.plant.left_out in name and version:
                continue
            own[name].copy_(tensor)
            if self.plant.rounded and self.plant.rounded in name:
                own[name].copy_(_rounded(own[name], 4))
            bits = self.plant.router_bits
            if bits is not None and name.endswith(("gate.weight", "router.weight")):
                own[name].copy_(_rounded(own[name], bits))


def _rounded(x: torch.Tensor, bits: int) -> torch.Tensor:
    """With so many bits of mantissa."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2**bits).round() / 2**bits, exponent)


def _without_first_route(done: Completion) -> Completion:
    return done if done.routes is None else replace(done, routes=done.routes[1:])


@contextmanager
def planted(plant: Plant) -> Iterator[None]:
    """Inside, runs generate with an engine that has this difference."""

    def make(
        inputs: ModelInputs, model: CausalModel, stops: frozenset[int], *, ranks: int = 1
    ) -> NativeEngine:
        cfg = inputs.cfg
        section = cfg.model.model_copy(update={"dtype": plant.dtype or cfg.model.dtype})
        copy = load_policy(cfg.model_copy(update={"model": section}), scores=False)
        assert isinstance(copy, CausalModel)
        return PlantedEngine(
            plant,
            copy,
            stop_tokens=stops,
            kv_gib=cfg.rollout.kv_gib,
            context=inputs.context,
            longest=inputs.longest + 1,
            routes=cfg.train.router_replay != "off",
        )

    with patch.object(engines, "native_engine", make):
        yield
