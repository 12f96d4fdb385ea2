"""A backend whose work is done by an actor.

What it is there (one process, FSDP2, DeepSpeed) nobody here needs to know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reinforge.backends.distributed.follower import WeightFollower
from reinforge.checkpoint.tensors import CheckpointTensors
from reinforge.cluster.frozen import FrozenModels
from reinforge.cluster.worker_group import WorkerGroup
from reinforge.core.backend import Backend, Loss, State, Stateful
from reinforge.core.batch import Batch, Totals
from reinforge.core.metrics import StepMetrics
from reinforge.core.model_facts import ModelFacts
from reinforge.core.report import StepReport
from reinforge.core.weights import Weights

Found = tuple[dict[str, Tensor], Tensor | None]  # streams and bootstrap of a pack


@dataclass(frozen=True, slots=True)
class RemoteWeights(Weights):
    """Weights that stay where they are: an engine in the same actor shares them, another one is
    sent references.
    """

    source: RemoteBackend | None = None


class RemoteBackend:
    """`factory(objects, *args)` makes the backend in the group's first actor, as object `name`.

    `shares`: an engine in that actor generates with the very module that trains. `writes`: its
    states are written into checkpoints and read from them where they are; nothing of them comes to
    the controller. All machines must see the directory of the run then. `frozen`: the models in
    actors of their own that tell streams in place of this backend.
    """

    def __init__(
        self,
        workers: WorkerGroup,
        name: str,
        factory: Callable[..., Any],
        *args: Any,
        shares: bool,
        writes: bool = False,
        frozen: FrozenModels | None = None,
    ):
        self.writes = writes
        self.frozen = frozen or FrozenModels()
        self.workers = workers
        self.name = name
        self.shares = shares
        workers.make(name, factory, *args)
        description = workers.apply(name, _describe)
        self.budget: int = description["budget"]
        self.share: bool = description["share"]
        self.steps: int = description["steps"]
        self.device = torch.device(description["device"])
        self.has_reference: bool = description["reference"] or self.frozen.reference is not None
        self.ema = WeightFollower(self, "ema") if description["ema"] else None
        self._parts: list[str] = description["parts"]

    def forget_teachers(self) -> None:
        self.workers.call(self.name, "forget_teachers")
        self.frozen.forget_teachers()

    def parts(self) -> dict[str, Stateful]:
        return {name: WeightFollower(self, name) for name in self._parts}

    @cached_property
    def _facts(self) -> ModelFacts:
        facts: ModelFacts = self.workers.call(self.name, "facts")
        return facts

    @property
    def devices(self) -> int:
        return len(self.workers.actors)

    def facts(self) -> ModelFacts:
        return self._facts

    # ---- training ----

    def annotate(self, batches: Sequence[Batch], needs: frozenset[str]) -> None:
        """What frozen models in actors of their own tell is computed at the same time."""
        if not needs or not batches:
            return
        elsewhere = needs & self.frozen.told
        own: list[Found] = [({}, batch.bootstrap) for batch in batches]
        with ThreadPoolExecutor(1) as beside:
            told = beside.submit(self.frozen.streams, batches, elsewhere)
            if needs - elsewhere:
                own = self._do(_annotate, list(batches), needs - elsewhere)
        for batch, (streams, bootstrap), more in zip(batches, own, told.result(), strict=True):
            batch.streams = batch.streams | streams | more
            batch.bootstrap = bootstrap

    def forward_backward(self, batches: Sequence[Batch], loss: Loss, totals: Totals) -> StepMetrics:
        metrics: StepMetrics = self._do(_run, "forward_backward", list(batches), loss, totals)
        return metrics

    def evaluate(self, batches: Sequence[Batch], loss: Loss, totals: Totals) -> StepMetrics:
        metrics: StepMetrics = self._do(_run, "evaluate", list(batches), loss, totals)
        return metrics

    def step(self) -> StepReport:
        report: StepReport = self._do(_run, "step")
        return report

    def _do(self, function: Callable[..., Any], *args: Any) -> Any:
        """Work that may change what is known of the backend here."""
        result, self.budget, self.steps = self.workers.apply(self.name, function, *args)
        return result

    # ---- weights and state ----

    def weights(self) -> Weights:
        return RemoteWeights("shared" if self.shares else "full", source=self)

    def state(self) -> State:
        """Its large tensors stay in the actors, or lie in the object store of this machine: they
        outlive the actor then, and must not be written.
        """
        return self.part_state("")

    def load(self, state: State) -> None:
        own = self._sent(state, lambda name: not name.startswith("part/"))
        _, self.budget, self.steps = self.workers.apply(self.name, _run, "load", own, views=True)

    def _sent(self, state: State, wanted: Callable[[str], bool] = lambda name: True) -> State:
        """What actors are sent of a state: names of files, where they read these themselves."""
        if self.writes and isinstance(state.tensors, CheckpointTensors):
            return State(state.tensors, state.meta)
        return State({name: t for name, t in state.tensors.items() if wanted(name)}, state.meta)

    def swap_part(self, part: str, into: bool) -> None:
        self.workers.apply(self.name, _swap, part, into)

    def part_state(self, part: str) -> State:
        if self.writes:
            meta = self.workers.apply(self.name, _part_meta, part)
            return State(meta=meta, shards={"": RemoteShards(self, part)})
        state: State = self.workers.apply(self.name, _part_state, part, views=True)
        return state

    def load_part(self, part: str, state: State) -> None:
        self.workers.apply(self.name, _part_load, part, self._sent(state), views=True)

    def close(self) -> None:
        """The actor ends with the cluster."""


class RemoteShards:
    """The tensors of a state that stay in actors, which write them into a checkpoint themselves.
    `RemoteBackend` puts it into its states.
    """

    def __init__(self, backend: RemoteBackend, part: str):
        self.backend = backend
        self.part = part

    def write(self, folder: Path, prefix: str) -> dict[str, dict[str, Any]]:
        written: dict[str, dict[str, Any]] = self.backend.workers.apply(
            self.backend.name, _write, self.part, folder, prefix
        )
        return written

    def gather(self) -> Mapping[str, Tensor]:
        """In the object store of this machine: they outlive the actor, and must not be written."""
        found: Mapping[str, Tensor] = self.backend.workers.apply(
            self.backend.name, _gather, self.part, views=True
        )
        return found

    def stage(self) -> None:
        """An actor does one thing at a time: while it writes, it does not train."""


# ---- in the actor ----

_swapping: dict[tuple[int, str], AbstractContextManager[None]] = {}


def _describe(backend: Backend) -> dict[str, Any]:
    return {
        "budget": backend.budget,
        "share": backend.share,
        "steps": backend.steps,
        "device": str(backend.device),
        "reference": backend.has_reference,
        "ema": backend.ema is not None,
        "parts": list(backend.parts()),
    }


def _annotate(
    backend: Backend, batches: list[Batch], needs: frozenset[str]
) -> tuple[list[Found], int, int]:
    before = [set(batch.streams) for batch in batches]
    backend.annotate(batches, needs)
    found: list[Found] = [
        (
            {name: t for name, t in batch.streams.items() if name in needs or name not in had},
            batch.bootstrap,
        )
        for batch, had in zip(batches, before, strict=True)
    ]
    return found, backend.budget, backend.steps


def _run(backend: Backend, method: str, *args: Any) -> tuple[Any, int, int]:
    return getattr(backend, method)(*args), backend.budget, backend.steps


def _part_state(backend: Backend, name: str) -> State:
    """Of the backend itself (""), or of what follows its weights."""
    return backend.parts()[name].state() if name else backend.state()


def _part_meta(backend: Backend, name: str) -> dict[str, Any]:
    return _part_state(backend, name).meta


def _write(backend: Backend, name: str, folder: Path, prefix: str) -> dict[str, dict[str, Any]]:
    (shards,) = _part_state(backend, name).shards.values()
    return shards.write(folder, prefix)


def _gather(backend: Backend, name: str) -> Mapping[str, Tensor]:
    (shards,) = _part_state(backend, name).shards.values()
    return shards.gather()


def _part_load(backend: Backend, name: str, state: State) -> None:
    backend.parts()[name].load(state)


def _swap(backend: Backend, name: str, into: bool) -> None:
    if into:
        assert name == "ema" and backend.ema is not None, f"{name} is no average of the weights"
        _swapping[id(backend), name] = context = backend.ema.swapped()
        context.__enter__()
    else:
        _swapping.pop((id(backend), name)).__exit__(None, None, None)
