"""Two processes that share the weights against one: the same log-probs, gradients, steps and states. One pair of ranks for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from reinforge.algorithms.corrections import tis
from reinforge.algorithms.loss import NLLLoss, PolicyLoss
from reinforge.algorithms.reduce import REDUCERS
from reinforge.algorithms.surrogates import ppo_clip
from reinforge.algorithms.value import ValueLoss
from reinforge.backends.fsdp import FsdpBackend, deal, even
from reinforge.backends.local import LocalBackend
from reinforge.backends.ranks import Ranks
from reinforge.backends.shard import ShardBackend
from reinforge.config.algorithm import ReferenceConfig
from reinforge.config.schema import AdapterConfig
from reinforge.core.backend import Backend, State
from reinforge.core.batch import Batch, Totals, pack
from reinforge.core.errors import InputError
from reinforge.models.adapters import add_adapter
from reinforge.models.causal import CausalModel
from reinforge.models.packed import PackedModel
from reinforge.models.scalar import ScalarModel
from toys import ToyTokenizer, gradients, make_module, make_samples, relative, train_config

LENGTHS = (20, 5, 12, 3, 9, 31, 4, 2)
KINDS = ("full", "tied", "lora", "bfloat16", "checkpointed")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks.open(2, "cpu") as opened:
        yield opened


def load(kind: str, seed: int = 0) -> PackedModel:
    """What each rank calls: the weights are a function of the seed. A vocabulary of 67 does not divide by 2."""
    module = make_module("qwen3" if kind == "lora" else "llama", seed, vocab_size=67, tie_word_embeddings=kind == "tied")
    if kind == "lora":
        module = add_adapter(module, AdapterConfig(rank=3), seed=seed)
        with torch.no_grad():
            for name, p in module.named_parameters():
                if "lora_B" in name:
                    p.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    if kind == "critic":
        return ScalarModel.on_trunk(module, ToyTokenizer())
    if kind == "checkpointed":
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return CausalModel(module.bfloat16() if kind == "bfloat16" else module)


def both(ranks: Ranks, kind: str = "full", reference: Any = True, **changes: Any) -> tuple[LocalBackend, FsdpBackend]:
    cfg, settings = train_config(**changes), {"total_steps": 10, "temperature": 0.8, "reference": reference}
    return LocalBackend(load(kind), cfg, **settings), FsdpBackend(ranks, partial(load, kind), cfg, full=load(kind), **settings)


def policy_loss(reduce: str = "token_mean") -> PolicyLoss:
    return PolicyLoss(partial(ppo_clip, low=0.2, high=0.2), REDUCERS[reduce], correction=partial(tis, cap=2.0), kl_coefficient=0.1,
                      entropy_coefficient=0.02, off_policy=True)  # fmt: skip


def summed(shard: ShardBackend) -> dict[str, torch.Tensor]:
    """Run by all ranks: the whole gradient."""
    return {name: shard._whole(name, piece).clone() for name, piece in shard.optimizer.sums.items()}


def gradient_of(backend: Any) -> dict[str, torch.Tensor]:
    if isinstance(backend, LocalBackend):
        return gradients(backend)
    return backend.ranks.call(backend.id, summed)[0]


def one_pass(backend: Any, samples: list[Any], budget: int, loss: Any) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    batches = pack(samples, budget, share=True)
    backend.annotate(batches, loss.needs)
    metrics = backend.forward_backward(batches, loss, Totals.of(batches, 32))
    found = gradient_of(backend)
    backend.load(backend.state()) if isinstance(backend, FsdpBackend) else backend.optimizer.zero()
    return found, metrics


def update(backend: Any, samples: list[Any], loss: Any = None) -> dict[str, float]:
    batches = pack(samples, 64)
    loss = loss or NLLLoss()
    backend.annotate(batches, loss.needs)
    return {**backend.forward_backward(batches, loss, Totals.of(batches, 32)), **backend.step()}


def frozen(state: State) -> State:
    return State({k: v.clone() for k, v in state.tensors.items()}, dict(state.meta))


def identical(a: State, b: State) -> bool:
    return a.tensors.keys() == b.tensors.keys() and a.meta == b.meta and all(torch.equal(a.tensors[k], b.tensors[k]) for k in a.tensors)


# ---- dealing ----


def test_packs_are_dealt_fairly() -> None:
    hands = deal([7, 100, 50, 60, 90, 8], 3)
    assert [[i for i, counts in hand] for hand in hands] == [[1, 0], [4, 5], [3, 2]]
    assert all(counts for hand in hands for _, counts in hand)
    hands = deal([5, 9], 4)  # two ranks have nothing of their own
    assert sorted(hands) == [[(0, False)], [(0, False)], [(0, True)], [(1, True)]]


def test_a_pack_is_cut_where_ranks_would_be_idle() -> None:
    samples = make_samples(LENGTHS)
    (batch,) = pack(samples, 10_000)
    (parts,) = even([[batch]], 2)
    assert len(parts) == 2 and [s.uid for p in parts for s in p.samples] == [s.uid for s in batch.samples]
    assert max(p.n_tokens for p in parts) <= 0.65 * batch.n_tokens
    assert [len(p) for p in even([[Batch.pack(samples[:1])]], 2)] == [1]  # one row cannot be cut
    (pairs,) = even([[Batch.pack(samples[:4])]], 2, unit=2)
    assert [len(p.samples) for p in pairs] == [2, 2]


# ---- the contract ----


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_and_metrics_are_those_of_one_process(ranks: Ranks, kind: str) -> None:
    """Whatever the budget: one pack for two ranks, an odd number of packs, one row per pack."""
    local, sharded = both(ranks, kind)
    assert isinstance(sharded, Backend)
    samples, loss = make_samples(LENGTHS), policy_loss()
    samples[4] = samples[4].with_(trained=torch.zeros_like(samples[4].trained))
    want, metrics = one_pass(local, samples, 10_000, loss)
    exact = kind != "bfloat16"
    for budget in (10_000, 40, 1):
        found, again = one_pass(sharded, samples, budget, loss)
        assert relative(found, want) < (1e-6 if exact else 2e-2), budget
        assert again == pytest.approx(metrics, rel=1e-4 if exact else 0.1, abs=1e-6 if exact else 0.05)
    sharded.close()


def test_runs(ranks: Ranks, make: Any) -> None:
    pass
