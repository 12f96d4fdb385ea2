"""DeepSpeed's ZeRO engine around one model, and the optimizer that it calls.

What the engine does: cuts masters and moments (stage 1), gradients (stage 2) and weights (stage 3)
over the ranks, moves them to host memory or disk, adds gradients up. What it does not do: it scales
no loss, counts no accumulation steps, clips nothing and knows no schedule. The update is torch's
AdamW on the flat piece of this rank, as everywhere else here.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from reinforge.backends.deepspeed.library import library, start_engine
from reinforge.backends.distributed.ranks import RankMember
from reinforge.backends.update_rules import parameter_groups, set_rate
from reinforge.config.deepspeed import DeepSpeedConfig
from reinforge.config.optimizer import OptimizerConfig
from reinforge.models.packed import PackedModel

MOMENTS = ("exp_avg", "exp_avg_sq")


class ClippedAdamW(torch.optim.AdamW):
    """The optimizer that DeepSpeed calls once per flat piece of the weights, with its gradient.
    `ZeroModel` makes it. It clips as one process does, by the norm over all pieces of all ranks.
    """

    norm: Callable[[], Any]
    rate = limit = 0.0
    seen = 0.0  # the norm of the newest gradient
    discards = False  # the gradient is thrown away

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        norm = self.seen = float(self.norm())
        if 0 < norm < math.inf and not self.discards:
            set_rate(self, self.rate)
            for group in self.param_groups:
                for p in group["params"] if self.limit and norm > self.limit else ():
                    p.grad.mul_(self.limit / norm)
            super().step()
        for group in self.param_groups:
            for p in group["params"]:
                # what is offloaded keeps it, and adds nothing where the next batch has no gradient
                p.grad.zero_()

    def prepare(self, piece: Tensor) -> None:
        """State as before the first step."""
        zeros = {key: torch.zeros_like(piece) for key in MOMENTS}
        self.state[piece] = {
            "step": torch.zeros((), dtype=torch.float32, device=piece.device),
            **zeros,
        }


class ZeroModel:
    """One rank's part of a model and its optimizer, as DeepSpeed holds them. `DeepSpeedWorker`
    makes it and calls it; everything here is called by all ranks at once.
    """

    def __init__(
        self,
        member: RankMember,
        model: PackedModel,
        cfg: DeepSpeedConfig,
        optimizer: OptimizerConfig,
    ):
        self.member = member
        self.stage = cfg.stage
        self.parameters = {
            name: p for name, p in model.module.named_parameters() if p.requires_grad
        }
        self.shapes = {name: p.shape for name, p in self.parameters.items()}
        self.adam = ClippedAdamW(
            parameter_groups(self.parameters, optimizer),
            lr=0.0,
            betas=optimizer.betas,
            eps=optimizer.eps,
            fused=True,
        )
        self.engine = start_engine(member, model, cfg, self.adam)
        self.zero = self.engine.optimizer
        self.adam.norm = self._norm
        self.pending = False  # whether there is a gradient
        for i, piece in enumerate(self.pieces):
            with self._there(i):
                self.adam.prepare(piece)
        if self.stage in (1, 2):
            self.zero._lazy_init_hp_params_optimizer_state()

    def _norm(self) -> Any:
        """Of the gradient over all ranks."""
        return self.zero._global_grad_norm

    @property
    def pieces(self) -> list[Tensor]:
        """The flat float32 masters that this rank updates."""
        found: list[Tensor] = (
            self.zero.single_partition_of_fp32_groups
            if self.stage < 3
            else self.zero.fp32_partitioned_groups_flat
        )
        return found

    @contextlib.contextmanager
    def _there(self, i: int) -> Iterator[None]:
        """Inside, piece `i` and its moments are in memory: they may be on disk."""
        swapped = self.stage == 3 and self.zero._swappable_optimizer_subgroup(i)
        if swapped:
            self.zero._optimizer_states_and_gradient_swap_in(i)
        yield
        if swapped:
            self.zero._optimizer_states_and_gradient_swap_out(i)

    # ---- training ----

    def run(self, work: Callable[[], Any]) -> Any:
        return self.engine(work)

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of the sum of `loss` over ranks; DeepSpeed takes the mean."""
        self.engine.backward(loss * self.member.size)
        self.pending = True

    def update(self, rate: float, limit: float) -> float:
        """One step; the norm of the gradient before clipping.

        One that is not finite leaves everything untouched.
        """
        if not self.pending:
            return 0.0
        self.adam.rate, self.adam.limit = rate, limit
        self.engine.step()
        self.pending = False
        applied = self.engine.was_step_applied()
        self._clear_spent(applied)
        return float(self.engine.get_global_grad_norm()) if applied else math.inf

    def _clear_spent(self, applied: bool) -> None:
        """The gradients of a step that is over, where DeepSpeed would keep them."""
        # with offload in bfloat16 the bad gradient would stay and be added to
        if self.stage < 3 and not applied:
            self.zero.averaged_gradients.update(dict.fromkeys(self.zero.averaged_gradients))
        # a weight without a gradient in the next batch would keep this one's
        if self.stage == 3 and not self.zero.offload_optimizer:
            for p in self.parameters.values():
                library().utils.safe_get_local_grad(p).zero_()

    def drop_gradients(self) -> None:
        if self.pending:
            self.adam.discards = True
            self.update(0.0, 0.0)
            self.adam.discards = False

    # ---- whole tensors ----

    def tensors(self) -> dict[str, Tensor]:
        """Nothing that one rank could tell alone: see `whole_state`."""
        return {}

    @contextlib.contextmanager
    def weight(self, name: str, changes: bool = False) -> Iterator[nn.Parameter]:
        """Inside, the weight is whole, as layers compute with it."""
        p = self.parameters[name]
        if self.stage < 3:
            yield p
            return
        with library().zero.GatheredParameters([p], modifier_rank=0 if changes else None):
            yield p

    @property
    def updates(self) -> Tensor:
        """How many there were, as AdamW counts them."""
        step: Tensor = self.adam.state[self.pieces[0]]["step"]
        return step.to("cpu", copy=True)

    def master(self, name: str) -> Tensor:
        found: Tensor = library().utils.safe_get_full_fp32_param(self.parameters[name])
        return found

    def moment(self, name: str, key: str) -> Tensor:
        found: Tensor = library().utils.safe_get_full_optimizer_state(self.parameters[name], key)
        return found

    def put(self, name: str, key: str, value: Tensor) -> None:
        """Sets a master, with the weight that is rounded from it, or a moment, from the whole
        tensor, which every rank has.
        """
        utils = library().utils
        p: Any = self.parameters[name]
        value = value.to(self.member.device, torch.float32)
        if key == "master":
            with self.weight(name, changes=True):
                p.data.copy_(value)
        master = utils.safe_set_full_fp32_param
        moment = utils.safe_set_full_optimizer_state
        if self.stage == 3:  # the same for whole tensors knows no padding
            master = utils.safe_set_local_fp32_param
            moment = utils.safe_set_local_optimizer_state
            size = p.ds_tensor.numel()
            value = nn.functional.pad(
                value.flatten(), (0, size * self.member.size - value.numel())
            ).narrow(0, size * self.member.rank, size)
        if key == "master":
            master(p, value)
        else:
            moment(p, value, key)

    def reset(self) -> None:
        """No gradients, moments 0, no updates so far."""
        self.drop_gradients()
        self.count(0.0)
        for name, shape in self.shapes.items():
            for key in MOMENTS:
                self.put(name, key, torch.zeros(shape))

    def count(self, updates: float) -> None:
        for piece in self.pieces:
            self.adam.state[piece]["step"].fill_(updates)


class FrozenZeroModel:
    """A model that is not trained (a reference, a teacher), its weights cut as in stage 3.
    `DeepSpeedWorker` makes it and runs forwards in it.
    """

    def __init__(self, member: RankMember, model: PackedModel, cfg: DeepSpeedConfig):
        self.engine = start_engine(member, model, cfg, None)

    def run(self, work: Callable[[], Any]) -> Any:
        return self.engine(work)


def whole_state(zero: ZeroModel, stored: Mapping[str, torch.dtype]) -> dict[str, Tensor] | None:
    """The tensors of a checkpoint, as one process names and stores them, in the host memory of rank
    0.
    """
    out: dict[str, Tensor] = {}
    updates = zero.updates
    for name, dtype in stored.items():
        found = {"master": zero.master(name)}
        if float(updates):
            found |= {key: zero.moment(name, key) for key in MOMENTS}
        if zero.member.rank == 0:
            host = {key: value.to("cpu", copy=True) for key, value in found.items()}
            out[f"model/{name}"] = host["master"].to(dtype)
            if dtype == torch.float32:
                del host["master"]
            out |= {f"optimizer/{name}/{key}": value for key, value in host.items()}
            if float(updates):
                out[f"optimizer/{name}/step"] = updates.clone()
    return out if zero.member.rank == 0 else None
