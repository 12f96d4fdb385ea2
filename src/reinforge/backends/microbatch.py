"""The one micro-batch pass that every backend runs, and the size of a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from reinforge.backends.memory_model import (
    CPU_BUDGET,
    budget,
    copy_bytes,
    gradient_bytes,
    optimizer_bytes,
)
from reinforge.backends.teachers import Teachers, divergence_to
from reinforge.config.optimizer import OptimizerConfig
from reinforge.core.arrays import ints, to_device
from reinforge.core.backend import Loss, TrainedTokens
from reinforge.core.batch import Batch, Totals
from reinforge.core.kv_pool import left_free
from reinforge.core.metrics import Extreme, Metric, Reduction, StepMetrics, reduction_of, tensor_of
from reinforge.core.model_facts import ModelFacts
from reinforge.core.sample import Stop
from reinforge.core.trace import numbered
from reinforge.models.adapters import is_adapted
from reinforge.models.causal import CausalModel
from reinforge.models.checkpointing import is_on_host
from reinforge.models.device_memory import device_memory
from reinforge.models.packed import PackedModel
from reinforge.models.quick_mlp import is_quick
from reinforge.models.weight_kinds import count_weights


def trained_tokens(
    model: PackedModel,
    batch: Batch,
    loss: Loss,
    totals: Totals,
    temperature: float,
    teachers: Teachers | None = None,
) -> TrainedTokens:
    """The forward of one micro-batch, as the loss wants to see it: one pass of the trunk, and the
    heads that the loss `reads`.
    """
    states = model.states(batch)
    logprobs = states.new_zeros(batch.n_trained, dtype=torch.float32)
    entropy = None
    if "logprobs" in loss.reads:
        assert isinstance(model, CausalModel), (
            f"{type(loss).__name__} reads log-probs, and a {type(model).__name__} has none"
        )
        logprobs, entropy = model.logprobs(
            batch,
            temperature=temperature,
            entropy=loss.entropy,
            entropy_gradient=loss.entropy_gradient,
            states=states,
        )
    values = (
        model.values(batch, states, after="values_after" in loss.reads)
        if loss.reads & {"values", "values_after"}
        else None
    )
    lengths, whole = to_device(
        ints(
            [
                [s.n_trained for s in batch.samples],
                [totals.episode_tokens.get(s.episode, 1) for s in batch.samples],
            ]
        ),
        logprobs.device,
    )
    divergence = None
    if loss.divergence is not None:
        assert isinstance(model, CausalModel)
        divergence = divergence_to(teachers, model, states, batch, loss)
    return TrainedTokens(
        logprobs,
        entropy,
        batch.sequence,
        lengths,
        whole[batch.sequence],
        batch.streams,
        values,
        divergence,
    )


def annotate_values(model: PackedModel, batch: Batch, moved: Batch) -> None:
    """Fills the stream `values` and the bootstrap of a pack (`moved` is the same pack on the
    device): what the critic expects before each trained token, and after the last one of a sample
    that the token limit cut off. What ended by itself has no future.
    """
    states = model.states(moved)
    batch.streams["values"] = model.values(moved, states).cpu()
    cut = torch.tensor([s.stop is Stop.LENGTH for s in batch.samples], dtype=torch.bool)
    batch.bootstrap = torch.where(cut, model.last_values(moved, states).cpu(), 0.0)


def annotate_nothing(batch: Batch, needs: frozenset[str]) -> None:
    """The streams of a pack whose rows have nothing to train and took no room: there is nothing to
    compute.
    """
    assert not batch.n_tokens
    batch.streams |= {name: torch.zeros(0) for name in needs}
    if "values" in needs:
        batch.bootstrap = torch.zeros(len(batch.samples))


def combine(parts: Sequence[Mapping[str, Tensor | Extreme | Metric]]) -> StepMetrics:
    """The metrics of micro-batches, or of ranks, as those of the whole batch: shares of it add up.

    One transfer from the device, in float64: moments are subtracted from each other later. The
    elements of a vector (core/trace.py) are metrics of their own.
    """
    reductions: dict[str, Reduction] = {}
    columns: list[Tensor] = []
    for name in sorted({name for part in parts for name in part}):
        found = [part[name] for part in parts if name in part]
        values = torch.stack([_wide(part) for part in found])
        reduction = reduction_of(found[0])
        if reduction is Reduction.MAX:
            column = values.amax(0)
        elif reduction is Reduction.MIN:
            column = values.amin(0)
        else:
            column = values.sum(0)
        names = [numbered(name, i) for i in range(len(column))] if column.ndim else [name]
        reductions |= dict.fromkeys(names, reduction)
        columns.append(column.reshape(-1))
    if not columns:
        return {}
    numbers = torch.cat(columns).tolist()
    return {
        name: Metric(number, reduction)
        for (name, reduction), number in zip(reductions.items(), numbers, strict=True)
    }


def _wide(part: Tensor | Extreme | Metric) -> Tensor:
    if isinstance(part, Metric):
        return torch.tensor(float(part), dtype=torch.float64)
    return tensor_of(part).detach().double()


def facts_of(model: PackedModel, *, optimizer: OptimizerConfig | None = None) -> ModelFacts:
    """What the memory model wants to know, counted on the model itself. `optimizer`: other than the
    usual one.
    """
    adapted = is_adapted(model.module)
    plain = ModelFacts.of(model.config)
    counted = count_weights(model.module, experts=plain.experts, active=plain.active)
    return ModelFacts.of(
        model.config,
        itemsize=model.dtype.itemsize,
        rank=_rank(model) if adapted else None,
        weights=counted.base,
        trained=counted.trained,
        matrices=counted.matrices,
        met=counted.met,
        packed=counted.packed,
        head_norms=counted.head_norms,
        checkpointing=bool(getattr(model.plain, "is_gradient_checkpointing", False)),
        on_host=model.device.type == "cuda" and is_on_host(model.plain),
        compiled=any(
            getattr(part, "_compiled_call_impl", None) is not None for part in model.trunk.modules()
        ),
        fused=model.device.type == "cuda" and is_quick(model.trunk),
        **(optimizer or OptimizerConfig()).facts(),
    )


def _rank(model: PackedModel) -> int:
    return max(int(cfg.r) for cfg in model.module.peft_config.values())


def auto_budget(
    model: PackedModel,
    *,
    optimizer: OptimizerConfig | None = None,
    reference: bool = False,
    paired: bool = False,
    overlap: bool = False,
) -> int:
    """Packed tokens per micro-batch: what the memory model says fits into what is free on a GPU
    before the optimizer is made (a part of the device is for the engine's cache, a model that is
    `paired` with this one wants its own optimizer, and with `overlap` what is trained is there
    twice), what runs best on a CPU.
    """
    memory = device_memory(model.device)
    if memory is None:
        return CPU_BUDGET
    facts = facts_of(model, optimizer=optimizer)
    others = optimizer_bytes(facts) + gradient_bytes(facts) if paired else 0
    others += copy_bytes(facts) if overlap else 0
    reserved = left_free(memory.whole, overlap) + others
    return budget(facts, memory.free, reference=reference, reserved=reserved)
