"""Shared by tests of backends: the same small model in one process and cut, a loss that asks for
everything, and one pass over the same samples in each.
"""

from __future__ import annotations

import copy
import math
import tempfile
from functools import partial
from typing import Any

import torch

from helpers.toy_architectures import make_architecture
from helpers.toys import ToyTokenizer, gradients, make_module, make_samples, train_config
from reinforge.algorithms.losses.attributes import AttributeLoss, target
from reinforge.algorithms.losses.policy import PolicyLoss
from reinforge.algorithms.losses.supervised import NLLLoss
from reinforge.algorithms.parts.corrections import tis
from reinforge.algorithms.parts.reduce import REDUCERS
from reinforge.algorithms.parts.surrogates import ppo_clip
from reinforge.algorithms.parts.terms import LossTerms
from reinforge.backends.distributed.ranks import Ranks
from reinforge.backends.fsdp.backend import FsdpBackend
from reinforge.backends.fsdp.worker import FsdpWorker
from reinforge.backends.local import LocalBackend
from reinforge.config.adapter import AdapterConfig
from reinforge.core.backend import State
from reinforge.core.batch import Totals, pack
from reinforge.core.sample import Sample
from reinforge.models import checkpointing
from reinforge.models.adapters import add_adapter
from reinforge.models.causal import CausalModel
from reinforge.models.checkpointing import InputsOnHost, checkpoint_layers
from reinforge.models.packed import PackedModel
from reinforge.models.scalar import ScalarModel

LENGTHS = (20, 5, 12, 3, 9, 31, 4, 2)
ATTRIBUTES = ("helpfulness", "verbosity")


def graded_samples() -> list[Sample]:
    """Answers of which some were given both attributes, some one of them."""
    samples = make_samples(LENGTHS)
    for i, sample in enumerate(samples):
        for name, value in zip(ATTRIBUTES, (float(i % 5), 4.0 - i % 3), strict=True):
            missing = i % 4 == 1 and name == "verbosity"
            samples[i] = samples[i].with_(
                streams={
                    **samples[i].streams,
                    target(name): torch.full((len(sample.tokens),), math.nan if missing else value),
                }
            )
    return samples


def attributes_pass(backend: Any) -> tuple[dict[str, float], torch.Tensor]:
    """One step of an attribute model: what it reports, and [M, A] what its heads said before."""
    loss = AttributeLoss(ATTRIBUTES)
    batches = pack(graded_samples(), 40)
    backend.annotate(batches, frozenset({"values_after"}))
    loss.prepare(batches)
    metrics = backend.forward_backward(batches, loss, Totals.of(batches))
    said = torch.cat([b.streams["values_after"] for b in batches])
    return {**metrics, **backend.step().metrics()}, said


def load(kind: str, arch: str | None = None, seed: int = 0, **changes: Any) -> PackedModel:
    """What each rank calls: the weights are a function of the seed.

    A vocabulary of 67 does not divide by 2.
    """
    if kind in ("deepseek_v3", "ernie4_5_moe"):
        return CausalModel(make_architecture(kind))
    if kind == "experts":
        arch = "qwen2_moe"
        changes = {"output_router_logits": True, "router_aux_loss_coef": 0.5, **changes}
    module = make_module(
        arch or ("qwen3" if kind == "lora" else "llama"),
        seed,
        **{"vocab_size": 67, "tie_word_embeddings": kind == "tied", **changes},
    )
    if kind == "lora":
        module = add_adapter(module, AdapterConfig(rank=3), seed=seed)
        with torch.no_grad():
            for name, p in module.named_parameters():
                if "lora_B" in name:
                    p.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    if kind == "loaded":
        module = with_loaded_adapter(module, seed)
    if kind in ("critic", "low critic"):
        return ScalarModel.on_trunk(
            module.bfloat16() if kind == "low critic" else module, ToyTokenizer()
        )
    if kind == "attributes":
        return ScalarModel.on_trunk(module, ToyTokenizer(), attributes=ATTRIBUTES)
    if kind == "on host":  # where ranks have no GPU another tensor on the CPU plays the host
        InputsOnHost.devices = ("cpu",)
        checkpointing.LEAST = 1
        checkpoint_layers(module, "host")
    if kind == "checkpointed":
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = CausalModel(module.bfloat16() if kind == "bfloat16" else module)
    if kind == "head":
        model.add_value_head()
    return model


def with_loaded_adapter(module: Any, seed: int = 0) -> Any:
    """The module with an adapter that was trained and saved before, in the layers and beside them,
    as `adapter.path` loads it.
    """
    asked = AdapterConfig(rank=3, targets=["q_proj", "down_proj", "embed_tokens"])
    trained = add_adapter(copy.deepcopy(module), asked, seed=seed)
    with torch.no_grad():
        for p in (p for p in trained.parameters() if p.requires_grad):
            p.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    with tempfile.TemporaryDirectory() as folder:
        trained.save_pretrained(folder, save_embedding_layers=False)
        return add_adapter(module, AdapterConfig(path=folder), seed=seed + 1)


def both(
    ranks: Ranks, make: Any, reference: bool = True, **changes: Any
) -> tuple[LocalBackend, FsdpBackend]:
    settings = {"total_steps": 10, "temperature": 0.8, "reference": reference}
    own = {
        k: v for k, v in changes.items() if not k.endswith("_parallel") and k != "offload_weights"
    }
    local = LocalBackend(make(), train_config(**own), **settings)
    return local, FsdpBackend(
        ranks, make, train_config(backend="fsdp", **changes), full=make(), **settings
    )


def policy_loss(surrogate: Any = None, reduce: str = "token_mean") -> PolicyLoss:
    """Everything that a loss can ask of a backend."""
    return PolicyLoss(
        surrogate or partial(ppo_clip, low=0.2, high=0.2),
        REDUCERS[reduce],
        correction=partial(tis, cap=2.0),
        terms=LossTerms(kl=0.1, entropy=0.02),
        off_policy=True,
    )


def update(
    backend: Any, samples: list[Any], loss: Any = None, budget: int = 40
) -> dict[str, float]:
    """One step."""
    batches = pack(samples, budget, share=True)
    loss = loss or NLLLoss()
    backend.annotate(batches, loss.needs)
    return {
        **backend.forward_backward(batches, loss, Totals.of(batches, 32)),
        **backend.step().metrics(),
    }


def frozen(state: State) -> State:
    return State({k: v.clone() for k, v in state.tensors.items()}, dict(state.meta))


def identical(a: State, b: State) -> bool:
    return (
        a.tensors.keys() == b.tensors.keys()
        and a.meta == b.meta
        and all(torch.equal(a.tensors[k], b.tensors[k]) for k in a.tensors)
    )


def summed(shard: FsdpWorker) -> dict[str, torch.Tensor]:
    """Run by all ranks: the whole gradient."""
    return {name: shard._whole(name, piece).clone() for name, piece in shard.optimizer.sums.items()}


def norm(shard: FsdpWorker) -> float:
    return float(shard.optimizer.gradient_norm())


def one_pass(
    backend: Any, samples: list[Any], budget: int, loss: Any, share: bool
) -> tuple[Any, dict[str, float], torch.Tensor, float]:
    batches = pack(samples, budget, share=share)
    backend.annotate(batches, loss.needs | {"old"})
    metrics = backend.forward_backward(batches, loss, Totals.of(batches, 32))
    order = sorted((s.uid, i, n) for b in batches for n, s in enumerate(b.samples) for i in [id(b)])
    parts = {id(b): b.streams["old"].split(b.trained_lengths().tolist()) for b in batches}
    old = torch.cat([parts[i][n] for _, i, n in order])
    if isinstance(backend, LocalBackend):
        found = gradients(backend), metrics, old, float(backend.optimizer.gradient_norm())
        backend.optimizer.zero()
        return found
    found = (
        backend.ranks.call(backend.id, summed)[0],
        metrics,
        old,
        backend.ranks.call(backend.id, norm)[0],
    )
    backend.load(backend.state())
    return found
