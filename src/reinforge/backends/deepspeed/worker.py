"""Several processes around DeepSpeed's ZeRO: each rank's part of every pass."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from reinforge.backends.deepspeed.low_precision import LowPrecisionModel
from reinforge.backends.deepspeed.model import FrozenZeroModel, ZeroModel, whole_state
from reinforge.backends.deepspeed.replicated import ReplicatedModel
from reinforge.backends.distributed.ranks import RankMember
from reinforge.backends.distributed.worker import RankWorker
from reinforge.backends.memory_model import (
    CPU_BUDGET,
    budget,
    gradient_bytes,
    optimizer_bytes,
)
from reinforge.backends.microbatch import facts_of
from reinforge.backends.optimizer import learning_rate
from reinforge.backends.reference import FrozenReference, ReferencePolicy
from reinforge.config.algorithm import ReferenceConfig
from reinforge.config.train import TrainConfig
from reinforge.core.backend import State
from reinforge.core.batch import Batch
from reinforge.core.errors import InputError
from reinforge.core.kv_pool import KEEP
from reinforge.core.metrics import LossMetrics
from reinforge.core.model_facts import FLOAT, ModelFacts
from reinforge.core.report import StepReport
from reinforge.models.adapters import begins_as_base
from reinforge.models.causal import CausalModel
from reinforge.models.device_memory import device_memory
from reinforge.models.packed import PackedModel
from reinforge.models.router_bias import BIASES, keep_whole


class DeepSpeedWorker(RankWorker):
    """One rank's part of a model in DeepSpeed's ZeRO. `DeepSpeedBackend` makes it on every rank.

    `make` loads the model, whole and on the host. Methods are run by all ranks at once.
    """

    saves = "more ranks, or train.deepspeed.stage=3"
    optimizer: ZeroModel  # type: ignore[assignment]

    def __init__(
        self,
        member: RankMember,
        make: Callable[[], PackedModel],
        cfg: TrainConfig,
        settings: Mapping[str, Any],
        compiled: bool,
    ):
        assert not compiled, "the config refuses it"
        model = make()
        if model.value_head is not None and model.dtype != torch.float32:
            raise InputError(
                "DeepSpeed would round the head of a critic or reward model to bfloat16, and values"
                " are differences.",
                where="model.dtype",
                fix="Set model.dtype=float32, or train.backend=fsdp.",
            )
        if cfg.deepspeed.stage == 0 and model.dtype != torch.float32:
            raise InputError(
                "in stage 0 DeepSpeed adds up gradients of bfloat16 weights in bfloat16, which"
                " loses small ones.",
                where="train.deepspeed.stage",
                fix="Set it to 1, or model.dtype=float32.",
            )
        if isinstance(model, CausalModel):
            keep_whole(model.module)
        self.member = member
        self.itemsize = model.dtype.itemsize
        self._facts = facts_of(model)
        trained = {name: p for name, p in model.module.named_parameters() if p.requires_grad}
        self.stored = {name: p.dtype for name, p in trained.items()}
        self.shapes = {name: p.shape for name, p in trained.items()}
        self._frozen: CausalModel | None = None
        self._frozen_engine: FrozenZeroModel | None = None
        if (
            settings.get("reference")
            and isinstance(model, CausalModel)
            and not begins_as_base(model.module)
        ):
            self._frozen = CausalModel(copy.deepcopy(model.module).requires_grad_(False).eval())
            if cfg.deepspeed.stage == 3:
                self._frozen_engine = FrozenZeroModel(member, self._frozen, cfg.deepspeed)
            else:
                self._frozen.module.to(member.device)
        self._loading = False
        super().__init__(model, cfg, **settings)

    def facts(self) -> ModelFacts:
        """With this rank's share of what is cut: masters and moments from stage 1 on, gradients
        from stage 2, weights in stage 3.
        """
        size = self.member.size
        whole = replace(self._facts, offload=self.cfg.deepspeed.offload_optimizer != "none")
        stage = self.cfg.deepspeed.stage
        weights = (whole.weights or 0) // (size if stage == 3 else 1)
        trained = (whole.trained or 0) // (size if stage else 1)
        share = replace(whole, weights=weights, trained=trained)
        return replace(share, gradients=self._gradients(whole, share))

    def _gradients(self, whole: ModelFacts, share: ModelFacts) -> int:
        """Their bytes on this rank. In stage 1 those of 16 bits stay beside their sums."""
        stage = self.cfg.deepspeed.stage
        if stage == 1 and whole.masters:
            return whole.learning() * (FLOAT + whole.itemsize)
        return gradient_bytes(share if stage >= 2 else whole)

    def _budget(self, reference: bool, paired: bool) -> int:
        """As for one process, with a share of masters and moments, and in stage 3 two layers and
        the ends of the model in whole.
        """
        memory = device_memory(self.member.device)
        if memory is None:
            return CPU_BUDGET
        share = self.facts()
        gathered = (2 * share.body() // share.layers + 2 * share.vocab * share.hidden) * (
            share.itemsize + 4
        )
        others = optimizer_bytes(share) + gradient_bytes(share) if paired else 0
        reserved = int(KEEP * memory.whole) + others + gathered
        return budget(share, memory.free, reference=reference, reserved=reserved)

    def _optimizer(self) -> ZeroModel:  # type: ignore[override]
        kind = ZeroModel
        if self.cfg.deepspeed.stage == 0:
            kind = ReplicatedModel
        elif self.cfg.deepspeed.stage == 1 and self.model.dtype != torch.float32:
            kind = LowPrecisionModel
        return kind(self.member, self.model, self.cfg.deepspeed, self.cfg.optimizer)

    def _reference(self, model: CausalModel, kind: ReferenceConfig) -> ReferencePolicy:
        return FrozenReference(model, kind, self._frozen)

    def close(self) -> None:
        for engine in (
            self.optimizer.engine,
            None if self._frozen_engine is None else self._frozen_engine.engine,
        ):
            if engine is not None:
                engine.destroy()

    # ---- passes ----

    def _annotate(self, batch: Batch, needs: frozenset[str]) -> None:
        own = needs - {"reference"}
        if own:
            self.optimizer.run(partial(super()._annotate, batch, own))
        if "reference" in needs:
            assert self.reference is not None, "this backend was made without a reference"
            ask = partial(self.reference.logprobs, batch.to(self.member.device), self.temperature)
            found = (
                self.optimizer.run(ask)
                if self._frozen is None
                else ask()
                if self._frozen_engine is None
                else self._frozen_engine.run(ask)
            )
            batch.streams["reference"] = found.cpu()

    @property
    def retries(self) -> bool:
        """Stage 3 gathers weights by a plan that it made of earlier passes."""
        return self.cfg.deepspeed.stage < 3

    @property
    def has_gradients(self) -> bool:
        return self.optimizer.pending

    def _inside(self, work: Callable[[], tuple[Tensor, LossMetrics]]) -> tuple[Tensor, LossMetrics]:
        metrics: LossMetrics = {}

        def value_alone() -> Tensor:
            value, told = work()
            metrics.update(told)
            return value

        return self.optimizer.run(value_alone), metrics

    def _backward(self, value: Tensor) -> None:
        self.optimizer.backward(value)

    def _forget_gradients(self) -> None:
        self.optimizer.drop_gradients()

    def step(self) -> StepReport:
        rate = learning_rate(
            self.steps, self.cfg.learning_rate, self.cfg.schedule, self.total_steps
        )
        norm = self.optimizer.update(rate, self.cfg.max_grad_norm)
        self.steps += 1
        self._move_biases(math.isfinite(norm))
        if self.reference is not None:
            self.reference.after_step()
        return StepReport(grad_norm=norm, learning_rate=rate)

    # ---- whole tensors ----

    @torch.no_grad()
    def gathered(self, part: str = "") -> State | None:
        """The whole state of the backend in the host memory of rank 0."""
        assert not part, "nothing follows the weights"
        found = whole_state(self.optimizer, self.stored)
        return None if found is None else State({**found, **self._biases()}, super().state().meta)

    def _biases(self) -> dict[str, Tensor]:
        """Of the routers, as a state has them; every rank has all of them."""
        bias = self.experts.bias
        own = {} if bias is None else bias.tensors()
        return {f"{BIASES}{name}": x.to("cpu", copy=True) for name, x in own.items()}

    @torch.no_grad()
    def put_whole(self, targets: Mapping[str, Tensor]) -> None:
        """One at a time."""
        for name in self.optimizer.parameters:
            with self.optimizer.weight(name) as whole:
                if name in targets:
                    targets[name].copy_(whole)

    @torch.no_grad()
    def receive(self, tensors: dict[str, Tensor]) -> None:
        """Whole tensors, of which each rank keeps its shard at once."""
        if not self._loading:
            self.optimizer.reset()
            self._loading = True
        for key, tensor in tensors.items():
            kind, name, *rest = key.split("/")
            if key.startswith(BIASES):
                self.experts.load_biases({name: tensor})
            elif kind == "model":
                self.optimizer.put(name, "master", tensor)
            elif rest == ["step"]:
                self.optimizer.count(float(tensor))
            else:
                self.optimizer.put(name, rest[0], tensor)

    def load_received(self, part: str, meta: dict[str, Any]) -> None:
        self._loading = False
        self.steps = meta["steps"]
        if self.cfg.tokens_per_microbatch in ("auto", meta.get("budget_asked")):
            self.budget = meta["budget"]
