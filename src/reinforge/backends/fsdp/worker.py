"""One rank's part of a backend: what it holds of a model that is cut into shards, and its share of
every pass.

Every method here is run by all ranks at once: a rank with nothing to do computes a pack of another
and throws it away.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from reinforge.backends.distributed.parallel_layout import ParallelLayout
from reinforge.backends.distributed.ranks import RankMember
from reinforge.backends.distributed.worker import Dealt, RankWorker, Shortage, parameter_of
from reinforge.backends.fsdp.buckets import gather_rows, in_buckets
from reinforge.backends.fsdp.gathers import ForwardGathers
from reinforge.backends.fsdp.model import shard
from reinforge.backends.fsdp.optimizer import ShardedOptimizer
from reinforge.backends.fsdp.reference import ShardedReference, cut_apart, twin_of
from reinforge.backends.fsdp.tensor_parallel import TensorParallelPlan
from reinforge.backends.memory_model import budget, gradient_bytes, optimizer_bytes
from reinforge.backends.microbatch import CPU_BUDGET
from reinforge.backends.reference import ReferencePolicy
from reinforge.checkpoint.background import StagingCopies
from reinforge.checkpoint.tensors import Box, CheckpointTensors, file_tag, write_pieces
from reinforge.config.algorithm import ReferenceConfig
from reinforge.config.train import TrainConfig
from reinforge.core.backend import Loss, State
from reinforge.core.batch import Batch, Totals
from reinforge.core.errors import InputError
from reinforge.core.kv_pool import KEEP
from reinforge.core.metrics import LossMetrics, StepMetrics
from reinforge.core.model_facts import ModelFacts
from reinforge.models.adapters import is_adapted
from reinforge.models.causal import CausalModel
from reinforge.models.device_memory import device_memory
from reinforge.models.packed import PackedModel
from reinforge.models.router_bias import keep_whole
from reinforge.models.sequence import SequenceSlices, check_heads


class FsdpWorker(RankWorker):
    """One rank's part of a model that FSDP2 cut. `FsdpBackend` makes it on every rank.

    `make` loads the model, whole and on the host; `compiled`: its layers are compiled once it is
    cut.
    """

    saves = "more ranks, or model.gradient_checkpointing=true"
    writes_pieces = True
    optimizer: ShardedOptimizer

    def __init__(
        self,
        member: RankMember,
        make: Callable[[], PackedModel],
        cfg: TrainConfig,
        settings: Mapping[str, Any],
        compiled: bool,
    ):
        self.member = member
        self.parallel = ParallelLayout.of(cfg, member.size)
        self.mesh, self.tensor_mesh = _meshes(member.device.type, self.parallel)
        model = make()
        self.plan = (
            TensorParallelPlan(model, self.parallel.tensor) if self.parallel.tensor > 1 else None
        )
        slices = self._slices(model)
        if isinstance(model, CausalModel):
            keep_whole(model.module)
        self.dtype = model.dtype
        trained = {name: p for name, p in model.module.named_parameters() if p.requires_grad}
        self.stored = {name: p.dtype for name, p in trained.items()}
        self.shapes = {name: p.shape for name, p in trained.items()}
        self._frozen: CausalModel | None = None
        if (
            settings.get("reference")
            and isinstance(model, CausalModel)
            and not is_adapted(model.module)
        ):
            self._frozen = CausalModel(twin_of(model.module))
            self._frozen.slices = slices
        cut = partial(
            shard,
            mesh=self.mesh,
            device=member.device,
            plan=self.plan,
            tensor_mesh=self.tensor_mesh,
            offload=cfg.offload_weights,
        )
        # before the model is: until then they lie in the same memory
        self._frozen_root = None if self._frozen is None else cut_apart(self._frozen, cut)
        self.root = cut(model)
        self.collectives = ForwardGathers(self.root)
        self._reference_collectives = (
            ForwardGathers(self._frozen_root) if self._frozen_root is not None else self.collectives
        )
        model.slices = slices
        if compiled and self.plan is None:
            model.compile_layers()
        self._inbox: dict[str, Tensor] = {}
        self._staging: dict[str, StagingCopies] = {}  # by part
        self._swapped = ExitStack()
        super().__init__(model, cfg, **settings)

    def _slices(self, model: PackedModel) -> SequenceSlices | None:
        """The ranks of this one's sequence group."""
        parallel = self.parallel
        if parallel.sequence == 1:
            return None
        check_heads(model.config.num_attention_heads // parallel.tensor, parallel.sequence)
        mesh = init_device_mesh(
            self.member.device.type,
            (parallel.data_parallel, parallel.sequence, parallel.tensor),
            mesh_dim_names=("data", "slice", "tensor"),
        )
        return SequenceSlices(mesh["slice"].get_group())

    def facts(self) -> ModelFacts:
        """In the precision of a pass: shards are float32."""
        return replace(super().facts(), itemsize=self.dtype.itemsize, shards=self.member.size)

    def _budget(self, reference: bool, paired: bool) -> int:
        """As for one process, by what one rank holds."""
        memory = device_memory(self.member.device)
        if memory is None:
            return CPU_BUDGET * self.parallel.sequence
        share = self.facts()
        if self.cfg.offload_weights:
            # moments and gradients are not on the device
            share = replace(share, offload=True, trained=0)
        others = optimizer_bytes(share) + gradient_bytes(share) if paired else 0
        reserved = int(KEEP * memory.whole) + others
        fits = budget(share, memory.free, reference=reference, reserved=reserved)
        return fits * self.parallel.sequence

    def _optimizer(self) -> ShardedOptimizer:
        return ShardedOptimizer(
            self.model.module,
            self.cfg.optimizer,
            self.stored,
            self.mesh,
            self.plan,
            self.tensor_mesh,
        )

    def _reference(self, model: CausalModel, kind: ReferenceConfig) -> ReferencePolicy:
        root = self.root if self._frozen_root is None else self._frozen_root
        return ShardedReference(model, self.optimizer, kind, self._frozen, root)

    # ---- passes ----

    @property
    def retries(self) -> bool:
        """Slices of a pack and parts of a matrix are exchanged inside of layers, which a rank can
        only do that computes them.
        """
        return self.parallel.members == 1 and ForwardGathers.can_reset

    def _annotate_pack(self, batch: Batch, needs: frozenset[str]) -> None:
        own = needs - {"reference"}
        if own:
            work = partial(self._annotate, batch, own)
            self._agreed(batch, lambda: self.root(work), self.collectives)
            self.root.reshard()
        if "reference" in needs:
            asked = partial(self._annotate, batch, frozenset({"reference"}))
            self._agreed(batch, asked, self._reference_collectives)

    def train_packs(self, dealt: Dealt, loss: Loss, totals: Totals) -> StepMetrics | Shortage:
        found = super().train_packs(dealt, loss, totals)
        if not isinstance(found, Shortage):
            self.optimizer.collect()
        return found

    def _run(self, dealt: Dealt, loss: Loss, totals: Totals) -> StepMetrics | Shortage:
        found = super()._run(dealt, loss, totals)
        self.root.reshard()
        return found

    def _inside(self, work: Callable[[], tuple[Tensor, LossMetrics]]) -> tuple[Tensor, LossMetrics]:
        found: tuple[Tensor, LossMetrics] = self.root(work)
        return found

    # ---- whole tensors ----

    def state(self) -> State:
        """This rank's shards, under the names and in the precision that the whole has in a
        checkpoint.
        """
        found = super().state()
        weights = {
            f"model/{name}": found.tensors[f"model/{name}"].to(dtype)
            for name, dtype in self.stored.items()
        }
        return State({**found.tensors, **weights}, found.meta)

    def _alike(self, name: str, shape: Sequence[int]) -> bool:
        """Whether a tensor of a state is the same on every rank: counts, what is whole, and the
        biases of routers, which are no parameters.
        """
        return not shape or name in self.optimizer.whole or name not in self.shapes

    def _whole(self, name: str, piece: Tensor) -> Tensor:
        """The tensor that the shards of all ranks make up."""
        if self._alike(name, piece.shape):
            return piece
        shape = list(self.shapes[name])
        dim = self.split.get(name)
        if dim is not None:
            shape[dim] //= self.parallel.tensor
        whole = _joined(piece.to(self.member.device), self.mesh, 0, shape)
        if dim is None or self.tensor_mesh is None:
            return whole
        return _joined(whole, self.tensor_mesh, dim, self.shapes[name])

    @property
    def split(self) -> dict[str, int]:
        """Of each parameter that is cut over a tensor group, the dimension."""
        return {} if self.plan is None else self.plan.dims

    @torch.no_grad()
    def gathered(self, part: str = "") -> State | None:
        """The whole state of the backend, or of a part that follows the weights, in the host memory
        of rank 0.
        """
        local = self.part(part).state()
        out: dict[str, Tensor] = {}
        for key, piece in local.tensors.items():
            whole = self._whole(parameter_of(key), piece)
            if self.member.rank == 0:
                out[key] = whole.detach().to("cpu", copy=True)
        return State(out, local.meta) if self.member.rank == 0 else None

    @torch.no_grad()
    def put_whole(self, targets: Mapping[str, Tensor]) -> None:
        """In the precision of checkpoints, a bucket at a time."""
        kinds = {
            name: (dtype, self._alike(name, self.shapes[name]), self.split.get(name))
            for name, dtype in self.stored.items()
        }
        sizes = {name: self.shapes[name].numel() * kinds[name][0].itemsize for name in kinds}
        for names in in_buckets(kinds, sizes):
            dtype, alike, dim = kinds[names[0]]
            own = self.optimizer.parameters
            pieces = [own[name].to(self.member.device, dtype) for name in names]
            wholes = pieces if alike else self._wholes(names, pieces, dim)
            for name, whole in zip(names, wholes, strict=True):
                if name in targets:
                    targets[name].copy_(whole)

    def _wholes(
        self, names: Sequence[str], pieces: Sequence[Tensor], dim: int | None
    ) -> list[Tensor]:
        """The tensors of one bucket, which are cut over the tensor group along `dim`, if at all."""
        shapes = [list(self.shapes[name]) for name in names]
        if dim is None or self.tensor_mesh is None:
            return gather_rows(pieces, shapes, self.mesh.get_group())
        for shape in shapes:
            shape[dim] //= self.parallel.tensor
        parts = gather_rows(pieces, shapes, self.mesh.get_group())
        # their rows are what they are cut along, on the way
        turned = [part.movedim(dim, 0) for part in parts]
        shapes = [[len(t) * self.parallel.tensor, *t.shape[1:]] for t in turned]
        wholes = gather_rows(turned, shapes, self.tensor_mesh.get_group())
        return [whole.movedim(0, dim) for whole in wholes]

    def _box(self, key: str, shape: Sequence[int]) -> Box:
        """Where this rank's shard of a tensor of a state lies in the whole."""
        name = parameter_of(key)
        if self._alike(name, shape):
            return tuple((0, n) for n in shape)
        return self.parallel.box(shape, self.member.rank, self.split.get(name))

    def write_pieces(self, part: str, folder: Path, prefix: str) -> dict[str, dict[str, Any]]:
        """Writes what this rank holds of the state into a checkpoint."""
        return self._write(self.part(part).state().tensors, folder, prefix)

    def stage_pieces(self, part: str, key: str) -> None:
        """Copies what this rank holds of the state; a thread writes the copy once `key` in the
        store of the ranks says where, and answers there.
        """
        copied = self._staging.setdefault(part, StagingCopies()).of(self.part(part).state())
        threading.Thread(
            target=self._write_staged, args=(copied.tensors, key), name="checkpoint", daemon=True
        ).start()

    def _write_staged(self, copied: Mapping[str, Tensor], key: str) -> None:
        store = self.member.store
        while not store.check([key]):
            time.sleep(0.02)
        folder, prefix = json.loads(store.get(key))
        try:
            answer: dict[str, Any] = {"files": self._write(copied, Path(folder), prefix)}
        except Exception as error:  # whoever saves tells it
            answer = {"error": str(error)}
        store.set(f"{key}/{self.member.rank}", json.dumps(answer))

    def _write(
        self, local: Mapping[str, Tensor], folder: Path, prefix: str
    ) -> dict[str, dict[str, Any]]:
        """What several ranks have is written by one."""
        if not folder.is_dir():
            raise InputError(
                f"rank {self.member.rank} on {socket.gethostname()} does not see the directory of"
                " the run, into which it writes its part of a checkpoint.",
                where="run.dir",
                fix="Put it where all machines see it, or set run.checkpoint.sharded=false.",
            )
        own = {}
        shapes = {}
        boxes = {}
        for key, piece in local.items():
            name = parameter_of(key)
            alike = self._alike(name, piece.shape)
            first = (
                self.member.rank == 0
                if alike
                else name in self.split or self.member.rank % self.parallel.tensor == 0
            )
            if first and piece.numel():
                shape = tuple(piece.shape if alike else self.shapes[name])
                own[prefix + key], shapes[prefix + key], boxes[prefix + key] = (
                    piece,
                    shape,
                    self._box(key, shape),
                )
        return write_pieces(folder, own, shapes, boxes, file_tag(prefix, self.member.rank))

    def read_pieces(
        self, part: str, there: CheckpointTensors, keys: Sequence[str], meta: dict[str, Any]
    ) -> None:
        """Loads this rank's part of a state from a checkpoint's files, which every rank
        can read.
        """
        self._inbox = {key: there.part(key, self._box(key, there.shape(key))) for key in keys}
        self.load_received(part, meta)

    def cut(self, name: str, tensor: Tensor) -> list[Tensor]:
        size = self.member.size
        if self._alike(name, tensor.shape):
            return [tensor] * size
        return [self.parallel.piece(tensor, rank, self.split.get(name)) for rank in range(size)]

    def receive(self, pieces: dict[str, Tensor]) -> None:
        self._inbox.update(pieces)

    def load_received(self, part: str, meta: dict[str, Any]) -> None:
        state = State(self._inbox, meta)
        self._inbox = {}
        self.part(part).load(state)

    def swap(self, part: str, into: bool) -> None:
        """Whether the model computes with an average of its weights."""
        if into:
            assert part == "ema" and self.ema is not None, f"{part} is no average of the weights"
            self._swapped.enter_context(self.ema.swapped())
        else:
            self._swapped.close()


def _meshes(kind: str, parallel: ParallelLayout) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Over which ranks weights are cut into shards, and over which matrices are cut before that."""
    if parallel.tensor == 1:
        return init_device_mesh(kind, (parallel.size,)), None
    both = init_device_mesh(
        kind, (parallel.shards, parallel.tensor), mesh_dim_names=("shard", "tensor")
    )
    return both["shard"], both["tensor"]


def _joined(piece: Tensor, mesh: DeviceMesh, dim: int, shape: Sequence[int]) -> Tensor:
    size = torch.Size(shape)
    stride = torch.empty(size, device="meta").stride()
    return DTensor.from_local(
        piece, mesh, [Shard(dim)], run_check=False, shape=size, stride=stride
    ).full_tensor()
