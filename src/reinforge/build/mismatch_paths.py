"""The engine's path beside the trainer's: the same tokens through both, and the first operation
whose results part.

The trainer computes a whole sequence at once, the engine a prompt and then one token after the
other through its cache. What each module of the two models takes and gives is compared in the order
in which the trainer computes.

Legend: N tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from reinforge.build import engines
from reinforge.build.inputs import ModelInputs
from reinforge.build.readings import LogprobReader
from reinforge.core.sample import Sample
from reinforge.core.weights import Weights
from reinforge.engines.native import NativeEngine
from reinforge.models.causal import CausalModel

SAMPLES = 4  # that go through the engine
JUMP = 8.0  # times what all operations before it differ by, and more: here two paths part
EPSILONS = 16.0  # of the precision: less is nothing


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first operation whose results part. Part of a `PathComparison`."""

    operation: str
    gap: float  # relative to the size of its results
    before: float  # the largest gap of those before it


@dataclass(frozen=True, slots=True)
class PathComparison:
    """What the engine, as it is now, says of a few samples. `compare_paths` makes it."""

    samples: int
    tokens: int
    told: float  # mean |what the engine told - what it says now| in nats
    trainer: float  # mean |what it says now - what the trainer says|
    first: FirstDifference | None  # None: no operation parts from those before it


def compare_paths(reader: LogprobReader) -> PathComparison:
    """The first samples of the reader, through an engine as the configuration has it and with the
    weights that the samples say.
    """
    samples = reader.samples[:SAMPLES]
    counts = [sample.n_trained for sample in samples]
    recorded = reader.recorded[: sum(counts)]
    base = reader.trainers
    ours = reader.logprobs(base)[: sum(counts)]
    model = reader.loaded(base.precision, int(reader.claimed.max()))
    with reader.computing(model, base.precision), recorded_calls(model) as trainers:
        reader.states(model, samples[0])
    engine, now, calls = asyncio.run(_through_engine(reader, model, samples))
    gaps = [(now - recorded).abs(), (now - ours).abs()]
    told, apart = (float(gap.double().mean()) for gap in gaps)
    first = first_difference(trainers, calls, torch.finfo(engine.model.dtype).eps)
    return PathComparison(len(samples), sum(counts), told, apart, first)


async def _through_engine(
    reader: LogprobReader, model: CausalModel, samples: Sequence[Sample]
) -> tuple[NativeEngine, Tensor, list[ModuleCall]]:
    """An engine, its log-probs of the trained tokens, and what its modules did with the first
    sample.
    """
    cfg = reader.cfg
    longest = max(len(sample.tokens) for sample in samples)
    inputs = ModelInputs(cfg, False, longest + 1, frozenset(), longest, trains=False)
    engine = engines.native_engine(inputs, model, frozenset())
    await engine.update(Weights("shared", module=model.module), int(reader.claimed.max()))
    found = []
    calls: list[ModuleCall] = []
    for i, sample in enumerate(samples):
        start = int(sample.trained.nonzero()[0])
        tokens = sample.tokens.tolist()
        if i == 0:
            with recorded_calls(engine.model) as calls:
                told = await engine.forced(tokens, start, cfg.rollout.temperature, plain=True)
        else:
            told = await engine.forced(tokens, start, cfg.rollout.temperature)
        found.append(torch.tensor(told)[sample.trained[start:]])
    return engine, torch.cat(found), calls


# ---- what modules did ----


@dataclass(slots=True)
class ModuleCall:
    """What one module took and gave, token by token, over all of its calls. `recorded_calls` makes
    one for each.
    """

    name: str
    taken: list[Tensor]
    given: list[Tensor]

    @property
    def tokens(self) -> int:
        return sum(len(x) for x in self.given)


@contextmanager
def recorded_calls(model: CausalModel) -> Iterator[list[ModuleCall]]:
    """Inside, what the innermost modules of the trunk take and give is recorded, in the order in
    which they are called first.
    """
    calls: dict[str, ModuleCall] = {}
    order: list[ModuleCall] = []
    handles = []

    def hook(name: str) -> Any:
        def record(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            taken = args[0] if args else None
            if not isinstance(taken, Tensor) or not isinstance(out, Tensor):
                return
            if name not in calls:
                calls[name] = ModuleCall(name, [], [])
                order.append(calls[name])
            calls[name].taken.append(_by_token(taken))
            calls[name].given.append(_by_token(out))

        return record

    for name, module in model.plain.named_modules():
        if not any(True for _ in module.children()) and any(True for _ in module.parameters()):
            handles.append(module.register_forward_hook(hook(name)))
    try:
        yield order
    finally:
        for handle in handles:
            handle.remove()


def _by_token(x: Tensor) -> Tensor:
    """[N, ...] float32 on the host; a batch of one sequence is that sequence."""
    flat = x[0] if x.ndim > 1 and x.shape[0] == 1 else x
    return flat.detach().float().cpu().reshape(flat.shape[0], -1)


def first_difference(
    ours: Sequence[ModuleCall], theirs: Sequence[ModuleCall], epsilon: float
) -> FirstDifference | None:
    """Of the modules that both sides called for every token (experts are not), the first whose
    results are further apart than those before it; where what it took is already, the operation is
    the one before it.
    """
    others = {call.name: call for call in theirs}
    largest = 0.0
    last = ""
    for call in ours:
        other = others.get(call.name)
        if other is None or not 0 <= call.tokens - other.tokens <= 1:
            continue
        for mine, told, operation in (
            (call.taken, other.taken, f"{_after(last)}before {call.name}"),
            (call.given, other.given, call.name),
        ):
            gap = _gap(torch.cat(mine), torch.cat(told))
            if gap > max(EPSILONS * epsilon, JUMP * largest):
                return FirstDifference(operation, gap, largest)
            largest = max(largest, gap)
        last = call.name
    return None


def _after(name: str) -> str:
    return f"what comes after {name} and " if name else "what comes "


def _gap(mine: Tensor, told: Tensor) -> float:
    """The largest difference of a token, relative to the size of all."""
    mine = mine[: len(told)]
    size = float(mine.norm(dim=1).mean())
    return float((mine - told).norm(dim=1).max()) / size if size else 0.0
