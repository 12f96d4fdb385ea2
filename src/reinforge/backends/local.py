"""One process, one device. The gradient does not depend on how the batch was cut (see `Totals`)."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from reinforge.backends.microbatch import auto_budget, combine, trained_tokens
from reinforge.backends.optimizer import MasterAdamW, learning_rate
from reinforge.config.schema import TrainConfig
from reinforge.core.backend import Loss, Metrics, State
from reinforge.core.batch import Batch, Totals
from reinforge.core.errors import InputError
from reinforge.core.weights import Weights
from reinforge.models.adapters import adapter_off, is_adapted
from reinforge.models.causal import CausalModel


class LocalBackend:
    """Trains `model` in place. `temperature` is that of the rollouts: log-probs are always of softmax(logits / T)."""

    def __init__(self, model: CausalModel, cfg: TrainConfig, *, total_steps: int, temperature: float = 1.0, reference: bool = False):
        self.model, self.cfg, self.temperature, self.total_steps = model, cfg, temperature, total_steps
        self.optimizer = MasterAdamW(model.module, cfg.optimizer)
        self.steps = 0  # optimizer steps done, skipped and empty ones included: the schedule's clock
        self.budget = auto_budget(model) if cfg.tokens_per_microbatch == "auto" else cfg.tokens_per_microbatch
        self.share = cfg.share_prompts
        self.frozen: CausalModel | None = None
        if reference and not is_adapted(model.module):
            self.frozen = CausalModel(copy.deepcopy(model.module).requires_grad_(False).eval())

    @torch.no_grad()
    def annotate(self, batches: Sequence[Batch], needs: frozenset[str]) -> None:
        for batch in batches:
            moved = batch.to(self.model.device)
            if "old" in needs:
                batch.streams["old"] = self.model.logprobs(moved, temperature=self.temperature)[0].cpu()
            if "reference" in needs:
                batch.streams["reference"] = self._reference(moved).cpu()

    def _reference(self, batch: Batch) -> Tensor:
        if self.frozen is not None:
            return self.frozen.logprobs(batch, temperature=self.temperature)[0]
        with adapter_off(self.model.module):
            return self.model.logprobs(batch, temperature=self.temperature)[0]

    def forward_backward(self, batches: Sequence[Batch], loss: Loss, totals: Totals) -> Metrics:
        parts: list[dict[str, Tensor]] = []
        self.model.recompute(True)
        for batch in batches:
            if not batch.n_trained:
                continue
            tokens = trained_tokens(self.model, batch.to(self.model.device), loss, totals, self.temperature)
            value, metrics = loss(tokens, totals)
            if value.requires_grad:
                value.backward()
            parts.append({"train/loss": value, **metrics})
        self.model.recompute(False)
        return combine(parts)

    def step(self) -> Metrics:
        rate = learning_rate(self.steps, self.cfg.learning_rate, self.cfg.schedule, self.total_steps)
        norm = float(self.optimizer.gradient_norm())
        self.steps += 1
        limit = self.cfg.max_grad_norm
        if math.isfinite(norm) and norm > 0:
            self.optimizer.step(rate, limit / norm if limit and norm > limit else 1.0)
        self.optimizer.zero()
        return {
            "train/grad_norm": norm,
            "train/learning_rate": rate,
            "train/skipped": float(not math.isfinite(norm)),
            "train/empty": float(norm == 0),
        }

    def weights(self) -> Weights:
        return Weights("shared", module=self.model.module)

    def state(self) -> State:
        tensors = {f"model/{name}": p.detach() for name, p in self.optimizer.parameters.items()}
        tensors.update({f"optimizer/{name}": t for name, t in self.optimizer.tensors().items()})
        return State(tensors, {"steps": self.steps, "budget": self.budget})

    @torch.no_grad()
    def load(self, state: State) -> None:
        saved = {name.removeprefix("model/"): t for name, t in state.tensors.items() if name.startswith("model/")}
        own = self.optimizer.parameters
        if saved.keys() != own.keys() or any(saved[n].shape != own[n].shape for n in own):
            odd = sorted(saved.keys() ^ own.keys()) or [n for n in own if saved[n].shape != own[n].shape]
            raise InputError(f"the checkpoint is of another model: {len(odd)} parameters differ, e.g. {odd[0]}.", where="run.dir",
                             fix="Resume with the model and adapter the run was started with, or choose another run.dir.")  # fmt: skip
        for name, tensor in saved.items():
            own[name].copy_(tensor)
        self.optimizer.load({n.removeprefix("optimizer/"): t for n, t in state.tensors.items() if n.startswith("optimizer/")})
        self.steps = state.meta["steps"]
        if self.cfg.tokens_per_microbatch == "auto":  # memory that is free now is not the memory that was free then
            self.budget = state.meta["budget"]
