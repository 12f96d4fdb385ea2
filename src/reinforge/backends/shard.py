"""What one rank holds of a model whose weights are cut into as many pieces as there are ranks (FSDP2, `fully_shard`), and its half of every pass.

A piece is float32 and is its own master: a pass gathers the weights layer by layer, in the model's precision, and gradients come back
summed over ranks in float32. What the optimizer, the averages and the checkpoint see are plain tensors, the pieces themselves.

Every method here is run by all ranks at once: a rank with nothing to do computes a pack of another and throws it away.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from reinforge.backends.local import LocalBackend
from reinforge.backends.memory import KEEP, Facts, budget, gradient_bytes, optimizer_bytes
from reinforge.backends.microbatch import CPU_BUDGET, combine
from reinforge.backends.optimizer import MasterAdamW, host_copy
from reinforge.backends.ranks import Member
from reinforge.backends.reference import Reference
from reinforge.config.algorithm import ReferenceConfig
from reinforge.config.schema import OptimizerConfig, TrainConfig
from reinforge.core.backend import Loss, Metrics, State
from reinforge.core.batch import Batch, Totals
from reinforge.core.errors import InputError
from reinforge.models.adapters import is_adapted
from reinforge.models.causal import CausalModel
from reinforge.models.packed import PackedModel

Dealt = Sequence[tuple[Batch, bool]]  # packs of one rank, and whether they count


class Root(nn.Module):
    """Runs a piece of work inside a module, because gathering hangs on a module's call: our forward calls trunk and head by themselves."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, work: Callable[[], Any]) -> Any:
        return work()


def shard(model: PackedModel, mesh: DeviceMesh, device: torch.device) -> FSDPModule:
    """Cuts the model in place, layer by layer, so that no more than one whole layer is on the device at once. A value head is small
    and must not be rounded: it stays whole on every rank."""
    dtype = model.dtype
    whole = set() if model.value_head is None else set(model.value_head.parameters())
    for p in whole:
        p.data = p.data.to(device)
    policy = MixedPrecisionPolicy(None if dtype == torch.float32 else dtype, torch.float32, cast_forward_inputs=False)
    root = Root(model.module)
    for part in (*model.layers, root):
        for p in part.parameters():
            if p.requires_grad and not isinstance(p, DTensor) and p not in whole:
                p.data = p.data.float()
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=part is not root, ignored_params=whole)
    for part in root.modules():
        if isinstance(part, FSDPModule):  # losses are divided by global counts, so gradients are added and not averaged
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    assert isinstance(root, FSDPModule)
    return root


class ShardedAdamW(MasterAdamW):
    """AdamW on the pieces. `parameters` are plain float32 tensors that share their memory with what is sharded; what is `whole` is the
    same on every rank and counts once."""

    def __init__(self, module: nn.Module, cfg: OptimizerConfig, stored: Mapping[str, torch.dtype], rank: int):
        self.sharded = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.whole = {name for name, p in self.sharded.items() if not isinstance(p, DTensor)}
        self.stored, self.rank = stored, rank  # stored: in which precision a checkpoint holds the weights
        self.parameters = {name: p._local_tensor if isinstance(p, DTensor) else p.data for name, p in self.sharded.items()}
        self.offload, self.sums = cfg.offload, {}
        self.masters = {name: host_copy(p) for name, p in self.parameters.items()} if cfg.offload else dict(self.parameters)
        self._start(cfg)

    def collect(self) -> None:
        """Puts the gradients that a pass left where the optimizer looks for them. Those of whole parameters are summed here."""
        for name, p in self.sharded.items():
            if p.grad is None:
                continue
            if name in self.whole:
                dist.all_reduce(p.grad)
            piece = p.grad._local_tensor if isinstance(p.grad, DTensor) else p.grad
            if name in self.sums:
                self.sums[name].add_(piece)
            else:
                self.sums[name] = piece
            p.grad = None
        if not self.offload:
            for name, total in self.sums.items():
                self.masters[name].grad = total

    def gradient_norm(self) -> Tensor:
        """Over all pieces of all ranks."""
        grads = {name: self.sums[name] for name in self.masters if name in self.sums and (name not in self.whole or self.rank == 0)}
        norms = [n.double() for n in torch._foreach_norm(list(grads.values()))] if grads else []
        device = next(iter(self.parameters.values())).device
        total = torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64, device=device)
        dist.all_reduce(total)
        return total.sqrt().float()

    def zero(self) -> None:
        super().zero()
        for p in self.sharded.values():
            p.grad = None

    def tensors(self) -> dict[str, Tensor]:
        masters = {f"{name}/master": master for name, master in self.masters.items() if self.stored[name] != torch.float32}
        return {**super().tensors(), **masters}

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        for name, p in self.parameters.items():
            if f"{name}/master" in tensors:
                p.copy_(tensors[f"{name}/master"])
        super().load(tensors)


class ShardedReference(Reference):
    """The frozen copy is cut as the model is; it was made before that."""

    def __init__(self, model: CausalModel, optimizer: ShardedAdamW, cfg: ReferenceConfig, copied: CausalModel | None, root: FSDPModule | None):
        self.root, self._made = root, copied
        super().__init__(model, optimizer, cfg)

    def _copied(self) -> CausalModel:
        assert self._made is not None
        return self._made

    def logprobs(self, batch: Batch, temperature: float) -> Tensor:
        if self.root is None:
            return super().logprobs(batch, temperature)
        with torch.no_grad():
            found: Tensor = self.root(partial(super().logprobs, batch, temperature))
        self.root.reshard()
        return found

    @torch.no_grad()
    def _refresh(self) -> None:
        if self.copy is None or self.average is None:
            return
        for name, p in self.copy.module.named_parameters():
            if name in self.average.values:
                p._local_tensor.copy_(self.average.values[name])


class ShardBackend(LocalBackend):
    """One rank's part of a backend. `make` loads the model, whole and on the host; `compiled`: its layers are compiled once it is cut."""

    optimizer: ShardedAdamW

    def __init__(self, member: Member, make: Callable[[], PackedModel], cfg: TrainConfig, settings: Mapping[str, Any], compiled: bool):
        self.member, self.mesh = member, init_device_mesh(member.device.type, (member.size,))
        model = make()
        self.dtype = model.dtype
        trained = {name: p for name, p in model.module.named_parameters() if p.requires_grad}
        self.stored = {name: p.dtype for name, p in trained.items()}
        self.shapes = {name: (p.shape, p.stride()) for name, p in trained.items()}
        self._frozen: CausalModel | None = None
        if settings.get("reference") and isinstance(model, CausalModel) and not is_adapted(model.module):
            self._frozen = CausalModel(copy.deepcopy(model.module).requires_grad_(False).eval())
        self._frozen_root = shard(self._frozen, self.mesh, member.device) if self._frozen is not None else None
        self.root = shard(model, self.mesh, member.device)
        if compiled:
            model.compile_layers()
        self._inbox: dict[str, Tensor] = {}
        self._swapped = ExitStack()
        super().__init__(model, cfg, **settings)

    def facts(self) -> Facts:
        """With this rank's share of the weights."""
        whole = replace(super().facts(), itemsize=self.dtype.itemsize)
        return replace(whole, weights=(whole.weights or 0) // self.member.size, trained=(whole.trained or 0) // self.member.size)

    def _budget(self, reference: bool, paired: bool) -> int:
        """As for one process, with a share of weights and moments, and two layers and the ends of the model in whole."""
        if self.member.device.type != "cuda":
            return CPU_BUDGET
        share = self.facts()
        gathered = (2 * share.body() // share.layers + 2 * share.vocab * share.hidden) * (share.itemsize + 4)
        free, all_of_it = torch.cuda.mem_get_info(self.member.device)
        others = optimizer_bytes(share) + gradient_bytes(share) if paired else 0
        return budget(share, free, reference=reference, reserved=int(KEEP * all_of_it) + others + gathered)

    def _optimizer(self) -> ShardedAdamW:
        return ShardedAdamW(self.model.module, self.cfg.optimizer, self.stored, self.member.rank)

    def _reference(self, model: CausalModel, kind: ReferenceConfig) -> Reference:
        return ShardedReference(model, self.optimizer, kind, self._frozen, self._frozen_root)

    # ---- passes ----

    @torch.no_grad()
    def annotate_packs(self, dealt: Dealt, needs: frozenset[str]) -> list[tuple[dict[str, Tensor], Tensor | None]]:
        """Streams and bootstraps of the packs that count, in their order."""
        found = []
        for batch, counts in dealt:
            self._safely(batch, partial(self._annotate, batch, needs))
            if counts:
                found.append(({name: batch.streams[name] for name in needs if name in batch.streams}, batch.bootstrap))
        return found

    def _annotate(self, batch: Batch, needs: frozenset[str]) -> None:
        own = needs - {"reference"}
        if own:
            self.root(partial(super()._annotate, batch, own))
            self.root.reshard()
        if "reference" in needs:
            assert self.reference is not None, "this backend was made without a reference"
            ask = partial(self.reference.logprobs, batch.to(self.member.device), self.temperature)
            batch.streams["reference"] = (ask() if self._frozen_root is not None else self.root(ask)).cpu()
            self.root.reshard()

    def train_packs(self, dealt: Dealt, loss: Loss, totals: Totals) -> Metrics:
        self.model.recompute(True)
        try:
            found = self._run(dealt, loss, totals)
        finally:
            self.model.recompute(False)
        self.optimizer.collect()
        return found

    @torch.no_grad()
    def evaluate_packs(self, dealt: Dealt, loss: Loss, totals: Totals) -> Metrics:
        return self._run(dealt, loss, totals)

    def _run(self, dealt: Dealt, loss: Loss, totals: Totals) -> Metrics:
        parts: list[dict[str, Tensor]] = []
        for batch, counts in dealt:
            found = self._safely(batch, partial(self._one, batch, loss, totals, counts))
            if counts:
                parts.append(found)
        self.root.reshard()
        return combine(parts)

    def _one(self, batch: Batch, loss: Loss, totals: Totals, counts: bool) -> dict[str, Tensor]:
        """A pack that does not count runs through the same graph, so that no rank waits for a gradient that never comes, times 0."""
        value, metrics = self.root(partial(self._micro, batch, loss, totals))
        if value.requires_grad:
            (value if counts else value * 0.0).backward()
        return {"train/loss": value.detach(), **metrics}

    def _safely(self, batch: Batch, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except torch.OutOfMemoryError as error:  # the other ranks wait in the middle of the pass: it cannot be done again in smaller pieces
            raise InputError(f"a micro-batch of {batch.n_tokens} tokens does not fit into the memory of rank {self.member.rank}.",
                             where="train.tokens_per_microbatch", fix=f"Set it to {max(1, batch.n_tokens // 2)}, or use more ranks, or "
                             "model.gradient_checkpointing=true. The newest checkpoint is intact.") from error  # fmt: skip

    # ---- whole tensors ----

    def state(self) -> State:
        """This rank's pieces, under the names and in the precision that the whole has in a checkpoint."""
        found = super().state()
        for name, dtype in self.stored.items():
            found.tensors[f"model/{name}"] = found.tensors[f"model/{name}"].to(dtype)
        return found

    def _whole(self, name: str, piece: Tensor) -> Tensor:
        """The tensor that the pieces of all ranks make up."""
        if name in self.optimizer.whole or piece.ndim == 0:
            return piece
        shape, stride = self.shapes[name]
        placed = piece.to(self.member.device)
        return DTensor.from_local(placed, self.mesh, [Shard(0)], run_check=False, shape=shape, stride=stride).full_tensor()

    @torch.no_grad()
    def gathered(self, part: str = "") -> State | None:
        """The whole state of the backend, or of a part that follows the weights, in the host memory of rank 0."""
        local = getattr(self, part).state() if part else self.state()
        out: dict[str, Tensor] = {}
        for key, piece in local.tensors.items():
            whole = self._whole(parameter_of(key), piece)
            if self.member.rank == 0:
                out[key] = whole.detach().to("cpu", copy=True)
        return State(out, local.meta) if self.member.rank == 0 else None

    @torch.no_grad()
    def publish(self, targets: Mapping[str, Tensor] | None) -> None:
        """Puts the trained weights into `targets` on rank 0, one at a time."""
        for name, piece in self.optimizer.parameters.items():
            whole = self._whole(name, piece)
            if targets is not None:
                targets[name].copy_(whole)

    def receive(self, pieces: dict[str, Tensor]) -> None:
        self._inbox.update(pieces)

    def load_received(self, part: str, meta: dict[str, Any]) -> None:
        state, self._inbox = State(self._inbox, meta), {}
        (getattr(self, part) if part else self).load(state)

    def swap(self, part: str, into: bool) -> None:
        """Whether the model computes with an average of its weights."""
        if into:
            self._swapped.enter_context(getattr(self, part).swapped())
        else:
            self._swapped.close()

    def limit(self, budget: int) -> None:
        self.budget = budget


def parameter_of(key: str) -> str:
    """The parameter that a tensor of a state belongs to.

    >>> parameter_of("model/a.weight"), parameter_of("optimizer/a.weight/exp_avg"), parameter_of("a.weight")
    ('a.weight', 'a.weight', 'a.weight')
    """
    parts = key.split("/")
    return parts[0] if len(parts) == 1 else parts[1]
