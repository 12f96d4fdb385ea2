"""Megatron's layers on two ranks against one process without them: the same losses, gradients,
steps and states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch

if find_spec("megatron") is None:
    pytest.skip("pip install 'reinforge[megatron]'", allow_module_level=True)

from helpers.split_backends import LENGTHS, frozen, identical, load, policy_loss, update
from helpers.toys import make_samples, relative, train_config
from reinforge.algorithms.losses.supervised import NLLLoss
from reinforge.backends.distributed.ranks import Ranks
from reinforge.backends.fsdp.backend import FsdpBackend
from reinforge.backends.local import LocalBackend
from reinforge.backends.megatron.backend import MegatronBackend
from reinforge.core.backend import Backend, State
from reinforge.core.batch import Batch, Totals, pack
from reinforge.core.errors import InputError

MODELS: dict[str, Callable[[], Any]] = {
    "llama": partial(load, "full", "llama"),
    "tied": partial(load, "tied", "llama"),
    "biased": partial(load, "full", "qwen2"),
    "normed": partial(load, "full", "qwen3"),
    "unbounded": partial(load, "full", "mistral", sliding_window=None),
    "bfloat16": partial(load, "bfloat16", "llama"),
    "checkpointed": partial(load, "checkpointed", "qwen3"),
}
LAYOUTS = {"two groups of one": 1, "one group of two": 2}  # train.tensor_parallel on two ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks.open(2, "cpu") as opened:
        yield opened


def one(name: str, reference: bool = True, **changes: Any) -> LocalBackend:
    return LocalBackend(
        MODELS[name](),
        train_config(**changes),
        total_steps=10,
        temperature=0.8,
        reference=reference,
    )


def many(
    ranks: Ranks, name: str, tensor: int, reference: bool = True, **changes: Any
) -> MegatronBackend:
    cfg = train_config(backend="megatron", tensor_parallel=tensor, **changes)
    make = MODELS[name]
    return MegatronBackend(
        ranks, make, cfg, full=make(), total_steps=10, temperature=0.8, reference=reference
    )


def gradient(state: State) -> dict[str, torch.Tensor]:
    """After the first step the first moment is a tenth of it."""
    return {key: 10 * t for key, t in state.tensors.items() if key.endswith("/exp_avg")}


@pytest.mark.parametrize("tensor", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("name", MODELS)
def test_gradient_and_metrics_are_those_of_one_process(
    ranks: Ranks, name: str, tensor: int
) -> None:
    """Whatever the budget: one pack, several, one row per pack; and one row alone, so that a group
    has nothing.
    """
    local = one(name)
    cut = many(ranks, name, tensor)
    assert isinstance(cut, Backend)
    start = frozen(local.state())
    exact = name != "bfloat16"
    assert identical(cut.state(), start)
    rows = make_samples(LENGTHS)
    rows[4] = rows[4].with_(trained=torch.zeros_like(rows[4].trained))
    for samples, budgets in ((rows, (10_000, 16, 1)), (rows[5:6], (10_000,))):
        local.load(start)
        metrics = update(local, samples, policy_loss(), 10_000)
        want = gradient(local.state())
        for budget in budgets:
            cut.load(start)
            again = update(cut, samples, policy_loss(), budget)
            assert again == pytest.approx(
                metrics, rel=1e-4 if exact else 0.1, abs=1e-6 if exact else 0.05
            )
            assert abs(again["train/loss"] - metrics["train/loss"]) < (1e-6 if exact else 1e-2)
            assert relative(gradient(cut.state()), want) < (1e-6 if exact else 3e-2), budget
    cut.close()


@pytest.mark.parametrize("tensor", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("name", ["normed", "bfloat16"])
def test_steps_and_state_are_those_of_one_process(ranks: Ranks, name: str, tensor: int) -> None:
    """Rate, clipping, norm, decay: after three steps the two checkpoints hold the same names, types
    and values.
    """
    settings: dict[str, Any] = {
        "learning_rate": 1e-4,
        "schedule": {"kind": "cosine", "warmup": 2},
        "optimizer": {"weight_decay": 0.1},
        "max_grad_norm": 0.02,
    }
    local = one(name, **settings)
    cut = many(ranks, name, tensor, **settings)
    exact = name != "bfloat16"
    for seed in range(3):
        found, again = (update(b, make_samples(LENGTHS, seed), policy_loss()) for b in (local, cut))
        assert found["train/grad_norm"] > 0.02  # it is clipped
        assert again == pytest.approx(
            found, rel=1e-4 if exact else 0.2, abs=1e-6 if exact else 0.05
        )
    a = local.state()
    b = cut.state()
    assert a.meta == b.meta and {k: (t.dtype, t.shape) for k, t in a.tensors.items()} == {
        k: (t.dtype, t.shape) for k, t in b.tensors.items()
    }
    assert relative(gradient(b), gradient(a)) < (1e-5 if exact else 0.1)
    weights = [k for k in a.tensors if k.startswith("model/")]
    assert relative({k: b.tensors[k] for k in weights}, {k: a.tensors[k] for k in weights}) < (
        1e-6 if exact else 1e-2
    )
    cut.close()


@pytest.mark.parametrize("name", ["biased", "bfloat16"])
def test_state_continues_bit_for_bit_and_on_other_backends(ranks: Ranks, name: str) -> None:
    """Four steps against two, a new backend, and two more: identical.

    With another cut, in one process, or on FSDP: equal but for rounding.
    """
    settings = {"learning_rate": 1e-3, "optimizer": {"weight_decay": 0.01}}
    rows = [make_samples(LENGTHS, seed) for seed in range(4)]
    local = one(name, **settings)
    first = many(ranks, name, 2, **settings)
    losses = [update(first, r)["sft/loss"] for r in rows]
    end = frozen(first.state())
    first.load(start := frozen(local.state()))
    assert identical(first.state(), start)  # moments and gradients of the first life are gone
    for r in rows[:2]:
        update(first, r)
    middle = frozen(first.state())
    second = many(ranks, name, 2, **settings)
    batches = pack(rows[3], 40)
    # a gradient that was never used
    second.forward_backward(batches, NLLLoss(), Totals.of(batches, 32))
    second.load(middle)
    assert identical(second.state(), middle)
    assert [update(second, r)["sft/loss"] for r in rows[2:]] == losses[2:]
    assert identical(second.state(), end)
    make = MODELS[name]
    fsdp = FsdpBackend(
        ranks, make, train_config(backend="fsdp", **settings), total_steps=10, temperature=0.8
    )
    for other in (local, fsdp):
        other.load(middle)
        update(other, rows[2])
        second.load(frozen(other.state()))
        assert update(second, rows[3])["sft/loss"] == pytest.approx(
            losses[3], rel=1e-5 if name != "bfloat16" else 1e-2
        )
    with pytest.raises(InputError, match="another model"):
        second.load(State({"model/x": torch.zeros(2)}, middle.meta))
    for backend in (first, second, fsdp):
        backend.close()
    groups = many(ranks, name, 1, **settings)  # Megatron's groups are made anew
    groups.load(middle)
    assert [update(groups, r)["sft/loss"] for r in rows[2:]] == pytest.approx(
        losses[2:], rel=1e-5 if name != "bfloat16" else 1e-2
    )
    groups.close()


@pytest.mark.parametrize("tensor", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_the_engine_gets_the_weights_that_train(ranks: Ranks, tensor: int) -> None:
    cut = many(ranks, "normed", tensor, learning_rate=1e-2)
    batch = Batch.pack(make_samples(LENGTHS))
    for _ in range(2):
        update(cut, make_samples(LENGTHS))
        cut.annotate([batch], frozenset({"old"}))
        assert cut.weights().module is cut.full.module
        own = cut.full.logprobs(batch, temperature=0.8)[0]
        assert torch.allclose(own, batch.streams["old"], atol=2e-5)
    cut.close()


def test_gradients_of_several_passes_are_added_once(ranks: Ranks) -> None:
    """Two passes before a step, as a critic's loss beside the policy's would make: sums over ranks
    are taken once.
    """
    local = one("llama")
    cut = many(ranks, "llama", 1)
    for backend in (local, cut):
        for seed in (0, 1):
            batches = pack(make_samples(LENGTHS, seed), 40, share=True)
            backend.forward_backward(batches, NLLLoss(), Totals.of(batches, 32))
        backend.step()
    assert relative(gradient(cut.state()), gradient(local.state())) < 1e-6
    cut.close()
