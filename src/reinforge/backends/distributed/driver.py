"""A backend on several processes, seen from rank 0: it deals the packs of a batch out to the
workers and adds up what they found.

The gradient is that of a single process within rounding: losses are divided by `Totals`, counted
over the whole batch before it was dealt.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from reinforge.backends.distributed.dispatch import dispatch_packs, split_evenly
from reinforge.backends.distributed.follower import WeightFollower
from reinforge.backends.distributed.parallel_layout import ParallelLayout
from reinforge.backends.distributed.ranks import Ranks
from reinforge.backends.distributed.worker import RankWorker, Shortage, parameter_of
from reinforge.backends.local import refuse_other_model
from reinforge.backends.microbatch import annotate_nothing, combine
from reinforge.backends.oom import OomRecovery, fit_to_budget
from reinforge.checkpoint.tensors import CheckpointTensors, within, write_whole
from reinforge.config.train import TrainConfig
from reinforge.core.backend import Loss, State, Stateful
from reinforge.core.batch import Batch, Totals, rejoin
from reinforge.core.metrics import StepMetrics
from reinforge.core.model_facts import ModelFacts
from reinforge.core.report import StepReport
from reinforge.core.weights import Weights
from reinforge.models.packed import PackedModel
from reinforge.models.router_bias import BIASES

BUCKET = 256 << 20  # bytes of a state that are sent at once
STATE = ("model/", "optimizer/", BIASES)  # how the tensors of a backend's own state begin
POLL = 0.02  # seconds between two looks at whether a rank has written
GATHERED = 16 << 30  # bytes of a state that rank 0 takes into its memory


class DistributedBackend:
    """What the loops train with where `train.backend` is on ranks; `kind` says what every rank
    holds, and is all that FSDP, DeepSpeed and Megatron differ in.

    `make` loads the model: on every rank, whole and on the host. `full` is the model that rank 0
    generates with; its module gets the weights when they are asked for. `sharded`: checkpoints are
    written by the ranks, each its own part, or where a kind does not do that all of it by rank 0;
    None: where they are large. `settings` are those of `LocalBackend`.
    """

    kind: ClassVar[type[RankWorker]]

    def __init__(
        self,
        ranks: Ranks,
        make: Callable[[], PackedModel],
        cfg: TrainConfig,
        *,
        full: PackedModel | None = None,
        compiled: bool = False,
        sharded: bool | None = False,
        **settings: Any,
    ):
        self.ranks = ranks
        self.cfg = cfg
        self.full = full
        self.parallel = ParallelLayout.of(cfg, ranks.size)
        self.id = ranks.make(self.kind, [(make, cfg, settings, compiled)] * ranks.size)
        self.worker: RankWorker = ranks.own.objects[self.id]
        self._call("limit", min(self._call("__getattribute__", "budget")))
        self.budget = self.worker.budget
        self.recovery = OomRecovery()
        self.share = self.worker.share
        self.model = self.worker.model
        self.reference = (
            WeightFollower(self, "reference") if self.worker.reference is not None else None
        )
        self.ema = WeightFollower(self, "ema") if self.worker.ema is not None else None
        large = self.kind.writes_pieces and self._state_bytes() > GATHERED
        self.sharded = large if sharded is None else sharded
        self.staged = itertools.count()  # copies of states, for checkpoints in the background
        self._stale = True  # whether `full` may have other weights
        self._copied: nn.Module | None = None  # rank 0's copy, if ranks had any at the last gather

    @property
    def steps(self) -> int:
        return self.worker.steps

    @property
    def devices(self) -> int:
        return self.ranks.size

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def has_reference(self) -> bool:
        return self.reference is not None

    def forget_teachers(self) -> None:
        self._call("forget_teachers")

    def facts(self) -> ModelFacts:
        return self.worker.facts()

    def parts(self) -> dict[str, Stateful]:
        moving = self.worker.reference is not None and self.worker.reference.moving
        found = {"reference": self.reference if moving else None, "ema": self.ema}
        return {name: part for name, part in found.items() if part is not None}

    def close(self) -> None:
        """Frees what the ranks hold of this model."""
        if self.ranks.usable:
            self._call("close")
            self.ranks.drop(self.id)

    def _call(self, method: str, *args: Any) -> list[Any]:
        """The same on every rank."""
        return self.ranks.call(self.id, method, [args] * self.ranks.size)

    def _dispatch(self, method: str, by_group: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The same on the ranks of a model-parallel group, which find the same."""
        return self.parallel.first(self.ranks.call(self.id, method, self.parallel.spread(by_group)))

    # ---- training ----

    def annotate(self, batches: Sequence[Batch], needs: frozenset[str]) -> None:
        if not batches or not needs:
            return
        while not self._annotated(batches, needs):
            pass  # in smaller parts: memory ran out

    def _annotated(self, batches: Sequence[Batch], needs: frozenset[str]) -> bool:
        """Whether there was memory for it."""
        cuts = split_evenly(
            [fit_to_budget([batch], self.budget) for batch in batches], self.parallel.data_parallel
        )
        packs = [part for parts in cuts for part in parts if part.n_tokens]
        for nothing in (part for parts in cuts for part in parts if not part.n_tokens):
            annotate_nothing(nothing, needs)
        shares = dispatch_packs([p.n_tokens for p in packs], self.parallel.data_parallel)
        found = self._dispatch(
            "annotate_packs",
            [([(packs[i], counts) for i, counts in share], needs) for share in shares],
        )
        if self._short(packs, shares, found, 1, forget=False):
            return False
        for share, streams in zip(shares, found, strict=True):
            for i, (named, bootstrap) in zip(
                [i for i, counts in share if counts], streams, strict=True
            ):
                packs[i].streams |= named
                packs[i].bootstrap = bootstrap
        for batch, parts in zip(batches, cuts, strict=True):
            rejoin(batch, parts)
        return True

    def forward_backward(self, batches: Sequence[Batch], loss: Loss, totals: Totals) -> StepMetrics:
        """Where memory runs out in the forward pass of a rank, all of them do the whole pass again
        in smaller micro-batches with the same totals.
        """
        fresh = not self.worker.has_gradients
        while True:
            found = self._pass("train_packs", batches, loss, totals)
            if found is not None:
                return found
            if not fresh:
                # what an earlier call of the same optimizer step added up cannot be told from what
                # this one did
                raise torch.OutOfMemoryError(
                    "memory ran out in a rank, in the second pass of an optimizer step"
                )

    def evaluate(self, batches: Sequence[Batch], loss: Loss, totals: Totals) -> StepMetrics:
        """What the loss says of the batches, without a gradient."""
        while True:
            found = self._pass("evaluate_packs", batches, loss, totals)
            if found is not None:
                return found

    def _pass(
        self, method: str, batches: Sequence[Batch], loss: Loss, totals: Totals
    ) -> StepMetrics | None:
        """None where memory ran out: the budget is smaller then."""
        whole = [
            [part]
            for part in fit_to_budget([b for b in batches if b.n_trained], self.budget, loss.unit)
        ]
        packs = [
            part
            for parts in split_evenly(whole, self.parallel.data_parallel, loss.unit)
            for part in parts
            if part.n_trained
        ]
        if not packs:
            return {}
        shares = dispatch_packs([p.n_tokens for p in packs], self.parallel.data_parallel)
        found = self._dispatch(
            method,
            [([(packs[i], counts) for i, counts in share], loss, totals) for share in shares],
        )
        forget = method == "train_packs"
        return None if self._short(packs, shares, found, loss.unit, forget) else combine(found)

    def _short(
        self,
        packs: Sequence[Batch],
        shares: Sequence[Sequence[tuple[int, bool]]],
        found: Sequence[Any],
        unit: int,
        forget: bool,
    ) -> bool:
        """Whether memory ran out in a rank. Then all of them get smaller packs from now on."""
        failed = [
            packs[share[answer.pack][0]]
            for share, answer in zip(shares, found, strict=True)
            if isinstance(answer, Shortage) and answer.pack is not None
        ]
        if not failed:
            return False
        self.recovery.working = min(failed, key=lambda pack: pack.n_tokens)
        self.budget = self.recovery.smaller(self.budget, unit)
        self._call("shrink", self.budget, forget)
        return True

    def step(self) -> StepReport:
        self._stale = True
        report: StepReport = self._call("step")[0]
        return replace(report, out_of_memory=self.recovery.report())

    # ---- weights and state ----

    def weights(self) -> Weights:
        """The module that rank 0 generates with, up to date. The ranks compute the proof."""
        assert self.full is not None, "this backend was made without a module to generate with"
        copy = self.ranks.own.copy
        if self._stale or copy is not self._copied:
            others: list[tuple[Any, ...]] = [()] * (self.ranks.size - 1)
            self.ranks.call(self.id, "publish", [(self.full.module,), *others])
            self._stale = False
            self._copied = copy
        return Weights("shared", module=self.full.module, probe=self.probe)

    def probe(self, tokens: Sequence[int]) -> Tensor:
        """The log-probs of these tokens at temperature 1, by the shards."""
        found: Tensor = self._call("probe", list(tokens))[0]
        return found

    def state(self) -> State:
        """Whole tensors, as the state of one process is: a run continues with any number of ranks,
        or with none.
        """
        return self.part_state("")

    def part_state(self, part: str) -> State:
        """Of the backend (""), or of what follows its weights.

        What ranks write themselves stays with them.
        """
        if self.sharded:
            meta = self.worker.part(part).state().meta
            return State(meta=meta, shards={"": RankShards(self, part)})
        state: State = self._call("gathered", part)[0]
        return state

    def _state_bytes(self) -> int:
        """About: weights as they are stored, masters where these are not float32, and
        two moments.
        """
        sizes = (
            (self.worker.shapes[name].numel(), dtype.itemsize)
            for name, dtype in self.worker.stored.items()
        )
        return sum(n * (size + (4 if size < 4 else 0) + 8) for n, size in sizes)

    def load(self, state: State) -> None:
        refuse_other_model(within(state.tensors, "model/"), self.worker.shapes)
        self.load_part("", state)
        self.budget = self.worker.budget

    def swap_part(self, part: str, into: bool) -> None:
        self._stale = True
        self._call("swap", part, into)

    def load_part(self, part: str, state: State) -> None:
        """Gives every rank its shards, a bucket at a time, and lets it load them.

        What is in shards on disk, the ranks read themselves.
        """
        self._stale = True
        keys = [key for key in state.tensors if part or key.startswith(STATE)]
        if self.kind.writes_pieces and isinstance(state.tensors, CheckpointTensors):
            self._call("read_pieces", part, state.tensors, keys, state.meta)
            return
        bucket: list[dict[str, Tensor]] = [{} for _ in range(self.ranks.size)]
        room = BUCKET
        for key in keys:
            tensor = state.tensors[key]
            room -= tensor.numel() * tensor.element_size()
            for pieces, piece in zip(
                bucket, self.worker.cut(parameter_of(key), tensor), strict=True
            ):
                pieces[key] = piece.clone()
            if room <= 0:
                self.ranks.call(self.id, "receive", [(pieces,) for pieces in bucket])
                bucket = [{} for _ in range(self.ranks.size)]
                room = BUCKET
        self.ranks.call(self.id, "receive", [(pieces,) for pieces in bucket])
        self._call("load_received", part, state.meta)


class RankShards:
    """The tensors of a state as the ranks hold them: what a checkpoint asks to be written.

    They write them into a checkpoint at the same time, each its own files; rank 0 writes what a
    kind of backend can only gather.
    """

    def __init__(self, backend: DistributedBackend, part: str):
        self.backend = backend
        self.part = part

    def write(self, folder: Path, prefix: str) -> dict[str, dict[str, Any]]:
        if not self.backend.kind.writes_pieces:
            return write_whole(folder, self.gather(), prefix)
        written = self.backend._call("write_pieces", self.part, folder, prefix)
        return {name: entry for files in written for name, entry in files.items()}

    def gather(self) -> Mapping[str, Tensor]:
        state: State = self.backend._call("gathered", self.part)[0]
        return state.tensors

    def stage(self) -> StagedShards | None:
        if not self.backend.kind.writes_pieces:
            return None
        ranks = self.backend.ranks
        number = next(self.backend.staged)
        self.backend._call("stage_pieces", self.part, f"staged/{self.backend.id}/{number}")
        return StagedShards(ranks, f"staged/{self.backend.id}/{number}")


class StagedShards:
    """Copies of what ranks hold of a state, each with a thread of its rank that waits to write it.
    `RankShards.stage` makes it; a checkpoint in the background asks it to be written.

    The threads hear of the place through the store of the ranks: their commands go on meanwhile.
    """

    def __init__(self, ranks: Ranks, key: str):
        self.ranks = ranks
        self.key = key

    def write(self, folder: Path, prefix: str) -> dict[str, dict[str, Any]]:
        store = self.ranks.own.store
        store.set(self.key, json.dumps([str(folder), prefix]))
        found: dict[str, dict[str, Any]] = {}
        for rank in range(self.ranks.size):
            answer = f"{self.key}/{rank}"
            while not store.check([answer]):
                if not self.ranks.usable:
                    raise self.ranks.fault()
                time.sleep(POLL)
            told = json.loads(store.get(answer))
            if "error" in told:
                raise OSError(f"rank {rank}: {told['error']}")
            found |= told["files"]
        return found

    def gather(self) -> Mapping[str, Tensor]:
        raise AssertionError("a copy is written, and nothing else")

    def stage(self) -> StagedShards:
        return self
