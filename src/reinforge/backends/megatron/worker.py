"""Several processes around Megatron's layers: each rank's part of every pass.

Ranks of a tensor group work on the same packs. Groups work on packs of their own, and add their
gradients up once per optimizer step; each has masters and moments of everything its ranks hold.
States have transformers' names and whole tensors, so a run continues on any other backend, and the
other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from reinforge.backends.distributed.parallel_layout import ParallelLayout
from reinforge.backends.distributed.ranks import RankMember
from reinforge.backends.distributed.worker import RankWorker
from reinforge.backends.megatron.model import MegatronModel, WeightPlacement
from reinforge.backends.megatron.optimizer import GroupOptimizer
from reinforge.backends.reference import FrozenReference, ReferencePolicy
from reinforge.config.algorithm import ReferenceConfig
from reinforge.config.train import TrainConfig
from reinforge.core.backend import State
from reinforge.core.errors import InputError
from reinforge.core.report import StepReport
from reinforge.models.causal import CausalModel
from reinforge.models.packed import PackedModel


class MegatronWorker(RankWorker):
    """One rank's part of a model in Megatron's layers. `MegatronBackend` makes it on every rank.

    `make` loads the model, whole and on the host. Methods are run by all ranks at once.
    """

    saves = "a larger train.tensor_parallel, or model.gradient_checkpointing=true"
    optimizer: GroupOptimizer
    model: MegatronModel

    def __init__(
        self,
        member: RankMember,
        make: Callable[[], PackedModel],
        cfg: TrainConfig,
        settings: Mapping[str, Any],
        compiled: bool,
    ):
        assert not compiled, "the config refuses it"
        hosted = make()
        if not isinstance(hosted, CausalModel) or hosted.value_head is not None:
            raise InputError(
                "the backend megatron trains causal LMs without further heads.",
                where="train.backend",
                fix="Set train.backend=fsdp for critics and reward models.",
            )
        self.member = member
        self.parallel = ParallelLayout.of(cfg, member.size)
        trained = dict(hosted.module.named_parameters())
        self.stored = {name: p.dtype for name, p in trained.items()}
        self.shapes = {name: p.shape for name, p in trained.items()}
        self._frozen = (
            MegatronModel(member, loaded_again(make), self.parallel.tensor, trained=False)
            if settings.get("reference")
            else None
        )
        self._inbox: dict[str, Tensor] = {}
        super().__init__(MegatronModel(member, hosted, self.parallel.tensor), cfg, **settings)

    def _optimizer(self) -> GroupOptimizer:
        return GroupOptimizer(self.model, self.cfg.optimizer)

    def _reference(self, model: CausalModel, kind: ReferenceConfig) -> ReferencePolicy:
        return FrozenReference(model, kind, self._frozen)

    @property
    def retries(self) -> bool:
        """The ranks of a tensor group talk inside of layers; groups do so once per step."""
        return self.parallel.tensor == 1

    def step(self) -> StepReport:
        self.optimizer.reduce()
        return super().step()

    # ---- whole tensors ----

    def _pieces(self) -> Iterator[tuple[str, WeightPlacement, Tensor]]:
        """Of each tensor of the state: its key with transformers' name, where that lies, and
        Megatron's tensor.
        """
        places: dict[str, list[tuple[str, WeightPlacement]]] = {}
        for name, place in self.model.places.items():
            places.setdefault(place.own, []).append((name, place))
        for key, tensor in super().state().tensors.items():
            kind, own, *rest = key.split("/")
            for name, place in places[own]:
                yield "/".join([kind, name, *rest]), place, tensor

    def _whole(self, place: WeightPlacement, tensor: Tensor) -> Tensor:
        """What the shards of a tensor group make up. A number (of steps) is what it is."""
        if tensor.ndim == 0:
            return tensor
        piece = place.take(tensor.detach()).contiguous()
        if place.dim is None or self.parallel.tensor == 1:
            return piece
        parts = [torch.empty_like(piece) for _ in range(self.parallel.tensor)]
        dist.all_gather(parts, piece, group=self.model.group)
        return torch.cat(parts, place.dim)

    @torch.no_grad()
    def gathered(self, part: str = "") -> State | None:
        """The whole state of the backend in the host memory of rank 0."""
        assert not part, "nothing follows the weights"
        out: dict[str, Tensor] = {}
        for key, place, tensor in self._pieces():
            found = self._whole(place, tensor)
            if self.member.rank == 0:
                out[key] = found.to("cpu", copy=True)
        return State(out, super().state().meta) if self.member.rank == 0 else None

    @torch.no_grad()
    def put_whole(self, targets: Mapping[str, Tensor]) -> None:
        """One at a time."""
        own = self.optimizer.parameters
        for name, place in self.model.places.items():
            found = self._whole(place, own[place.own])
            if name in targets:
                targets[name].copy_(found)

    def receive(self, tensors: dict[str, Tensor]) -> None:
        """Whole tensors, of which each rank keeps its shard."""
        model = self.model
        for key, tensor in tensors.items():
            place = model.places[key.split("/")[1]]
            self._inbox[key] = (
                tensor if tensor.ndim == 0 else place.cut(tensor, model.place, model.tensor).clone()
            )

    @torch.no_grad()
    def load_received(self, part: str, meta: dict[str, Any]) -> None:
        own = self.optimizer.parameters
        found = dict[str, Tensor]()
        for key, piece in self._inbox.items():
            kind, name, *rest = key.split("/")
            place = self.model.places[name]
            target = "/".join([kind, place.own, *rest])
            if piece.ndim == 0:
                found[target] = piece
                continue
            place.put(
                found.setdefault(target, torch.zeros(own[place.own].shape, dtype=piece.dtype)),
                piece,
            )
        self._inbox = {}
        self.load(State(found, meta))


def loaded_again(make: Callable[[], PackedModel]) -> CausalModel:
    model = make()
    assert isinstance(model, CausalModel)
    return model
