"""One process, one device. The gradient does not depend on how the batch was cut (see `Totals`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from reinforge.backends.compact import CompactOptimizer
from reinforge.backends.deterministic import Determinism
from reinforge.backends.ema import WeightAverage
from reinforge.backends.experts import TrainedExperts
from reinforge.backends.microbatch import (
    annotate_nothing,
    annotate_values,
    auto_budget,
    combine,
    facts_of,
    trained_tokens,
)
from reinforge.backends.oom import OomRecovery, fit_to_budget, memory_errors
from reinforge.backends.optimizer import MasterOptimizer, learning_rate
from reinforge.backends.reference import ReferencePolicy
from reinforge.backends.teachers import OF_TEACHERS, Teachers, teacher_streams
from reinforge.checkpoint.tensors import CheckpointTensors, within
from reinforge.config.algorithm import ReferenceConfig
from reinforge.config.train import TrainConfig
from reinforge.core.backend import Loss, State, Stateful, TrainedTokens
from reinforge.core.batch import Batch, Totals, rejoin
from reinforge.core.errors import InputError
from reinforge.core.metrics import LossMetrics, StepMetrics
from reinforge.core.model_facts import ModelFacts
from reinforge.core.report import StepReport
from reinforge.core.turns import TURNS
from reinforge.core.weights import Weights
from reinforge.models.adapter_dropout import DroppedRows, drop_rows, dropouts
from reinforge.models.causal import CausalModel
from reinforge.models.divergence import log_collision
from reinforge.models.fp8_layers import Fp8Layers
from reinforge.models.neftune import neftune
from reinforge.models.packed import PackedModel
from reinforge.models.router_bias import BIASES


class LocalBackend:
    """Trains `model` in place: a policy, a critic or a reward model.

    `temperature` is that of the rollouts: log-probs are always of softmax(logits / T).
    `seed` is the run's, for noise (train.neftune, adapter.dropout). `paired`: another model of
    about the same size is trained on the same device (a critic beside its policy). `overlap`: an
    engine generates there while it trains.
    """

    def __init__(
        self,
        model: PackedModel,
        cfg: TrainConfig,
        *,
        total_steps: int,
        temperature: float = 1.0,
        reference: bool | ReferenceConfig = False,
        paired: bool = False,
        overlap: bool = False,
        seed: int = 0,
        teachers: Teachers | None = None,
    ):
        self.model = model
        self.cfg = cfg
        self.temperature = temperature
        self.total_steps = total_steps
        self.overlap = overlap
        if cfg.precision == "fp8":
            Fp8Layers.of(model, "train.precision").source = "fresh"
        asked = cfg.tokens_per_microbatch
        self.budget = self._budget(bool(reference), paired) if asked == "auto" else asked
        self.optimizer = self._optimizer()
        self.recovery = OomRecovery()
        self.determinism = self._determinism()
        # optimizer steps done, skipped and empty ones included: the schedule's clock
        self.steps = 0
        # rows that share tokens cannot have noise of their own
        self.drops = any(dropouts(model.module))
        self.share = cfg.share_prompts and cfg.neftune is None and not self.drops
        self.seed = seed
        self.teachers = teachers
        self.experts = TrainedExperts(model, cfg)
        kind = ReferenceConfig() if isinstance(reference, bool) else reference
        self.reference = (
            self._reference(model, kind) if reference and isinstance(model, CausalModel) else None
        )
        self.ema = WeightAverage(self.optimizer, cfg.ema) if cfg.ema is not None else None

    @property
    def devices(self) -> int:
        return 1

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def has_reference(self) -> bool:
        return self.reference is not None

    def forget_teachers(self) -> None:
        self.teachers = None

    def facts(self) -> ModelFacts:
        return facts_of(self.model, optimizer=self.cfg.optimizer)

    def _budget(self, reference: bool, paired: bool) -> int:
        return auto_budget(
            self.model,
            optimizer=self.cfg.optimizer,
            reference=reference,
            paired=paired,
            overlap=self.overlap,
        )

    def _determinism(self) -> Determinism:
        return Determinism(self.cfg.deterministic, self.model.device)

    def _optimizer(self) -> MasterOptimizer:
        kind = CompactOptimizer if self.cfg.optimizer.compact else MasterOptimizer
        return kind(self.model.module, self.cfg.optimizer)

    def _reference(self, model: CausalModel, kind: ReferenceConfig) -> ReferencePolicy:
        return ReferencePolicy(model, self.optimizer, kind)

    @property
    def frozen(self) -> CausalModel | None:
        """The copy of the model that is the reference, if one was needed."""
        return None if self.reference is None else self.reference.copy

    def parts(self) -> dict[str, Stateful]:
        """What must survive a resume beside the state: what follows the weights."""
        moving: dict[str, Stateful] = (
            {"reference": self.reference}
            if self.reference is not None and self.reference.moving
            else {}
        )
        return moving | ({"ema": self.ema} if self.ema is not None else {})

    @torch.no_grad()
    def annotate(self, batches: Sequence[Batch], needs: frozenset[str]) -> None:
        if not needs:
            return
        waiting = list(batches)
        while waiting:
            parts = fit_to_budget(waiting[:1], self.budget)
            try:
                for part in parts:
                    self.recovery.working = part
                    with TURNS.working(), memory_errors(), self.determinism.enforced():
                        self._annotate(part, needs)
                rejoin(waiting.pop(0), parts)
                continue
            except torch.OutOfMemoryError:
                pass  # once this block is left nothing holds the tensors of the failed pass
            except RuntimeError as error:
                self.determinism.give_up(error)
                continue
            self.budget = self.recovery.smaller(self.budget, 1)

    def _annotate(self, batch: Batch, needs: frozenset[str]) -> None:
        if not batch.n_tokens:
            return annotate_nothing(batch, needs)
        moved = batch.to(self.model.device)
        if needs & {"old", "entropy", "collision"}:
            assert isinstance(self.model, CausalModel), (
                f"a {type(self.model).__name__} has no log-probs"
            )
            with self.experts.following(moved, self._here(moved)):
                states = self.model.states(moved)
            logprobs, entropy = self.model.logprobs(
                moved, temperature=self.temperature, entropy="entropy" in needs, states=states
            )
            batch.streams |= {"old": logprobs.cpu()} if "old" in needs else {}
            batch.streams |= {"entropy": entropy.cpu()} if entropy is not None else {}
            if "collision" in needs:
                places = self.model.reading(moved, moved.sources)
                found = log_collision(
                    places.rows(states), self.model.output, temperature=self.temperature
                )
                batch.streams["collision"] = places.join(found).cpu()
        if "reference" in needs:
            assert self.reference is not None, "this backend was made without a reference"
            batch.streams["reference"] = self.reference.logprobs(moved, self.temperature).cpu()
        if needs & OF_TEACHERS:
            batch.streams |= teacher_streams(self.teachers, moved, needs, self.temperature)
        if "values_after" in needs:
            batch.streams["values_after"] = self.model.values(moved, after=True).cpu()
        if "values" in needs:
            annotate_values(self.model, batch, moved)

    def forward_backward(self, batches: Sequence[Batch], loss: Loss, totals: Totals) -> StepMetrics:
        """Where memory runs out, the whole pass is done again in smaller micro-batches with the
        same totals.
        """
        fresh = not self.optimizer.gradients()
        while True:
            failed_for_memory = False
            try:
                with self._update():
                    return self._forward(
                        fit_to_budget(batches, self.budget, loss.unit), loss, totals
                    )
            except RuntimeError as error:
                # what an earlier call of the same optimizer step added up cannot be told from what
                # this one did
                if not fresh:
                    raise
                failed_for_memory = isinstance(error, torch.OutOfMemoryError)
                if not failed_for_memory:
                    self.determinism.give_up(error)
            self.optimizer.zero()
            if self.experts.bias is not None:
                self.experts.bias.forget()
            if failed_for_memory:
                self.budget = self.recovery.smaller(self.budget, loss.unit)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch], loss: Loss, totals: Totals) -> StepMetrics:
        """What the loss says of the batches, without a gradient."""
        while True:
            try:
                return self._forward(fit_to_budget(batches, self.budget, loss.unit), loss, totals)
            except torch.OutOfMemoryError:
                pass
            self.budget = self.recovery.smaller(self.budget, loss.unit)

    @contextmanager
    def _update(self) -> Iterator[None]:
        """Inside, layers may be computed again in the backward pass, adapters drop what they are to
        drop, tokens go to the experts that they are to go to, and sums are in the same order.
        """
        self.model.recompute(True)
        try:
            with self.determinism.enforced():
                yield
        finally:
            self.model.recompute(False)
            self.experts.follow(None)
            drop_rows(self.model.module, None)

    def _forward(self, batches: Sequence[Batch], loss: Loss, totals: Totals) -> StepMetrics:
        """Every micro-batch forward, and backward where gradients are on."""
        parts: list[LossMetrics] = []
        for batch in batches:
            if not batch.n_trained:
                continue
            self.recovery.working = batch
            with TURNS.working(), memory_errors():
                value, metrics = self._micro(batch, loss, totals)
                if value.requires_grad:
                    value.backward()
            parts.append({"train/loss": value.detach(), **metrics})
        return combine(parts)

    def _micro(
        self, batch: Batch, loss: Loss, totals: Totals, counts: bool = True
    ) -> tuple[Tensor, LossMetrics]:
        if not torch.is_grad_enabled():
            return loss(self._tokens(batch, loss, totals), totals)
        # of this micro-batch: those of all of them add up to 1
        share = batch.n_trained / totals.seen
        self.experts.follow(batch, self._here(batch))
        with self.experts.seen(share, counts=counts) as seen:
            tokens = self._tokens(batch, loss, totals)
        value, metrics = loss(tokens, totals)
        return value + seen.loss, metrics | seen.metrics

    def _tokens(self, batch: Batch, loss: Loss, totals: Totals) -> TrainedTokens:
        self._drop(batch)
        with self._noise(batch):
            return trained_tokens(
                self.model,
                batch.to(self.model.device),
                loss,
                totals,
                self.temperature,
                self.teachers,
            )

    def _noise(self, batch: Batch) -> AbstractContextManager[None]:
        """Noise on the embeddings while training, where it is asked for: a function of the run, the
        step and the row.
        """
        if self.cfg.neftune is None or not torch.is_grad_enabled():
            return nullcontext()
        return neftune(
            self.model.plain.get_input_embeddings(),
            batch,
            alpha=self.cfg.neftune,
            seed=(self.seed, self.steps),
            here=self._here(batch),
        )

    def _drop(self, batch: Batch) -> None:
        """What an adapter drops of this micro-batch, until its backward pass is done."""
        if self.drops and torch.is_grad_enabled():
            rows = DroppedRows(batch, (self.seed, self.steps), self._here(batch))
            drop_rows(self.model.module, rows)

    def _here(self, batch: Batch) -> slice:
        """Which tokens of a pack this process computes."""
        slices = self.model.slices
        return slice(None) if slices is None else slices.computed(batch.n_tokens)

    def step(self) -> StepReport:
        with TURNS.working():
            return self._step()

    def _step(self) -> StepReport:
        rate = learning_rate(
            self.steps, self.cfg.learning_rate, self.cfg.schedule, self.total_steps
        )
        norm = float(self.optimizer.gradient_norm())
        self.steps += 1
        limit = self.cfg.max_grad_norm
        if math.isfinite(norm) and norm > 0:
            self.optimizer.step(rate, limit / norm if limit and norm > limit else 1.0)
        self.optimizer.zero()
        self._move_biases(math.isfinite(norm))
        for follower in (self.reference, self.ema):
            if follower is not None:
                follower.after_step()
        return StepReport(grad_norm=norm, learning_rate=rate, out_of_memory=self.recovery.report())

    def _move_biases(self, moved: bool) -> None:
        """Those of the routers, after an update; `moved`: whether the weights did."""
        if self.experts.bias is not None:
            self.experts.bias.step(move=moved)

    def weights(self) -> Weights:
        return Weights("shared", module=self.model.module)

    def state(self) -> State:
        tensors = {f"model/{name}": p.detach() for name, p in self.optimizer.parameters.items()}
        tensors.update({f"optimizer/{name}": t for name, t in self.optimizer.tensors().items()})
        if self.experts.bias is not None:
            biases = self.experts.bias.tensors()
            tensors.update({f"{BIASES}{name}": tensor for name, tensor in biases.items()})
        asked = self.cfg.tokens_per_microbatch
        # memory ran out, and the number was halved
        shrunk = {"budget_asked": asked} if asked not in ("auto", self.budget) else {}
        return State(tensors, {"steps": self.steps, "budget": self.budget, **shrunk})

    @torch.no_grad()
    def load(self, state: State) -> None:
        saved = within(state.tensors, "model/")
        own = self.optimizer.parameters
        refuse_other_model(saved, {name: p.shape for name, p in own.items()})
        for name, tensor in saved.items():
            own[name].copy_(tensor)
        self.optimizer.load(within(state.tensors, "optimizer/"))
        self.experts.load_biases(dict(within(state.tensors, BIASES)))
        self.steps = state.meta["steps"]
        if self.cfg.tokens_per_microbatch in ("auto", state.meta.get("budget_asked")):
            # what was free then, or what was left of it when memory ran out
            self.budget = state.meta.get("budget", self.budget)


def refuse_other_model(saved: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> None:
    """An error that names a parameter where a checkpoint's weights are not those of the model."""
    found = {
        n: saved.shape(n) if isinstance(saved, CheckpointTensors) else tuple(saved[n].shape)
        for n in saved
    }
    if found == {n: tuple(shape) for n, shape in shapes.items()}:
        return
    odd = sorted(found.keys() ^ shapes.keys()) or [
        n for n in shapes if found[n] != tuple(shapes[n])
    ]
    raise InputError(
        f"the checkpoint is of another model: {len(odd)} parameters differ, e.g. {odd[0]}.",
        where="run.dir",
        fix=(
            "Resume with the model and adapter the run was started with, or choose another run.dir."
        ),
    )
