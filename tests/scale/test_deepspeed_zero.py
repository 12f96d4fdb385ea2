"""Two processes around DeepSpeed's ZeRO against one without it: the same losses, gradients, steps
and states. One pair of ranks for all tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch

if find_spec("deepspeed") is None:
    pytest.skip("pip install 'reinforge[deepspeed]'", allow_module_level=True)

from helpers.split_backends import LENGTHS, frozen, identical, load, policy_loss, update
from helpers.toys import make_samples, relative, train_config
from reinforge.algorithms.losses.supervised import NLLLoss
from reinforge.algorithms.losses.value import ValueLoss
from reinforge.backends.deepspeed.backend import DeepSpeedBackend
from reinforge.backends.deepspeed.worker import DeepSpeedWorker
from reinforge.backends.distributed.ranks import Ranks
from reinforge.backends.fsdp.backend import FsdpBackend
from reinforge.backends.local import LocalBackend
from reinforge.core.backend import Backend, State
from reinforge.core.batch import Batch, Totals, pack
from reinforge.core.errors import InputError

KINDS = ("full", "tied", "lora", "bfloat16", "checkpointed")
STAGES = (2, 3)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks.open(2, "cpu") as opened:
        yield opened


def one(kind: str = "full", reference: bool = True, **changes: Any) -> LocalBackend:
    return LocalBackend(
        load(kind), train_config(**changes), total_steps=10, temperature=0.8, reference=reference
    )


def many(
    ranks: Ranks,
    stage: int,
    kind: str = "full",
    reference: bool = True,
    more: Any = None,
    **changes: Any,
) -> DeepSpeedBackend:
    cfg = train_config(backend="deepspeed", deepspeed={"stage": stage, **(more or {})}, **changes)
    return DeepSpeedBackend(
        ranks,
        partial(load, kind),
        cfg,
        full=load(kind),
        total_steps=10,
        temperature=0.8,
        reference=reference,
    )


def gradient(state: State) -> dict[str, torch.Tensor]:
    """After the first step the first moment is a tenth of it."""
    return {key: 10 * t for key, t in state.tensors.items() if key.endswith("/exp_avg")}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_and_metrics_are_those_of_one_process(ranks: Ranks, stage: int, kind: str) -> None:
    """Whatever the budget: one pack for two ranks, several, one row per pack; and one row alone, so
    that a rank has nothing.
    """
    local = one(kind)
    zero = many(ranks, stage, kind)
    assert isinstance(zero, Backend)
    start = frozen(local.state())
    exact = kind != "bfloat16"
    assert identical(zero.state(), start)
    rows = make_samples(LENGTHS)
    rows[4] = rows[4].with_(trained=torch.zeros_like(rows[4].trained))
    for samples, budgets in ((rows, (10_000, 16, 1)), (rows[5:6], (10_000,))):
        local.load(start)
        metrics = update(local, samples, policy_loss(), 10_000)
        want = gradient(local.state())
        for budget in budgets:
            zero.load(start)
            again = update(zero, samples, policy_loss(), budget)
            assert again == pytest.approx(
                metrics, rel=1e-4 if exact else 0.1, abs=1e-6 if exact else 0.05
            )
            assert abs(again["train/loss"] - metrics["train/loss"]) < (1e-6 if exact else 1e-2)
            assert relative(gradient(zero.state()), want) < (1e-6 if exact else 3e-2), budget
    zero.close()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["full", "lora", "bfloat16"])
def test_steps_and_state_are_those_of_one_process(ranks: Ranks, stage: int, kind: str) -> None:
    """Rate, clipping, norm, decay: after three steps the two checkpoints hold the same names, types
    and values. Rows: any order adds up.
    """
    settings: dict[str, Any] = {
        "learning_rate": 1e-4,
        "schedule": {"kind": "cosine", "warmup": 2},
        "optimizer": {"weight_decay": 0.1},
        "max_grad_norm": 0.02,
    }
    local = one(kind, **settings)
    zero = many(ranks, stage, kind, **settings)
    exact = kind != "bfloat16"
    for seed in range(3):
        found, again = (
            update(b, make_samples(LENGTHS, seed), policy_loss()) for b in (local, zero)
        )
        assert found["train/grad_norm"] > 0.02  # it is clipped
        assert again == pytest.approx(
            found, rel=1e-4 if exact else 0.2, abs=1e-6 if exact else 0.05
        )
    a = local.state()
    b = zero.state()
    assert a.meta == b.meta and {k: (t.dtype, t.shape) for k, t in a.tensors.items()} == {
        k: (t.dtype, t.shape) for k, t in b.tensors.items()
    }
    assert relative(gradient(b), gradient(a)) < (1e-5 if exact else 0.1)
    weights = [k for k in a.tensors if k.startswith("model/")]
    assert relative({k: b.tensors[k] for k in weights}, {k: a.tensors[k] for k in weights}) < (
        1e-6 if exact else 1e-2
    )
    zero.close()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["full", "lora", "bfloat16"])
def test_state_continues_bit_for_bit_and_on_other_backends(
    ranks: Ranks, stage: int, kind: str
) -> None:
    """Four steps against two, a new backend, and two more: identical.

    By way of one process, or of FSDP: equal but for rounding.
    """
    settings = {"learning_rate": 1e-3, "optimizer": {"weight_decay": 0.01}}
    rows = [make_samples(LENGTHS, seed) for seed in range(4)]
    local = one(kind, **settings)
    whole = many(ranks, stage, kind, **settings)
    losses = [update(whole, r)["sft/loss"] for r in rows]
    end = frozen(whole.state())
    whole.load(start := frozen(local.state()))
    assert identical(whole.state(), start)  # moments and gradients of the first life are gone
    for r in rows[:2]:
        update(whole, r)
    middle = frozen(whole.state())
    second = many(ranks, stage, kind, **settings)
    batches = pack(rows[3], 40)
    # a gradient that was never used
    second.forward_backward(batches, NLLLoss(), Totals.of(batches, 32))
    second.load(middle)
    assert identical(second.state(), middle)
    assert [update(second, r)["sft/loss"] for r in rows[2:]] == losses[2:]
    assert identical(second.state(), end)
    fsdp = FsdpBackend(
        ranks,
        partial(load, kind),
        train_config(backend="fsdp", **settings),
        total_steps=10,
        temperature=0.8,
    )
    for other in (local, fsdp):
        other.load(middle)
        update(other, rows[2])
        second.load(frozen(other.state()))
        assert update(second, rows[3])["sft/loss"] == pytest.approx(
            losses[3], rel=1e-5 if kind != "bfloat16" else 1e-2
        )
    with pytest.raises(InputError, match="another model"):
        second.load(State({"model/x": torch.zeros(2)}, middle.meta))
    whole.close(), second.close(), fsdp.close()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["full", "lora", "bfloat16"])
def test_the_engine_gets_the_weights_that_train(ranks: Ranks, stage: int, kind: str) -> None:
    zero = many(ranks, stage, kind, learning_rate=1e-2)
    batch = Batch.pack(make_samples(LENGTHS))
    for _ in range(2):
        update(zero, make_samples(LENGTHS))
        zero.annotate([batch], frozenset({"old"}))
        assert zero.full is not None and zero.weights().module is zero.full.module
        own = dict(zero.full.module.named_parameters())
        state = zero.state()
        assert all(
            torch.equal(own[k.removeprefix("model/")], t)
            for k, t in state.tensors.items()
            if k.startswith("model/")
        )
        with torch.no_grad():
            served = zero.full.logprobs(batch, temperature=0.8)[0]  # type: ignore[attr-defined]
        assert float((served - batch.streams["old"]).abs().max()) < (
            2e-5 if kind != "bfloat16" else 0.2
        )
    zero.close()


class BadOnOneRow(NLLLoss):
    """NaN in the pack that holds the longest row, which is on one rank only."""

    def __call__(self, tokens: Any, totals: Totals) -> Any:
        loss, metrics = super().__call__(tokens, totals)
        return (
            loss + (float("nan") if int(tokens.lengths.max()) == 29 else 0.0) * tokens.logprobs[0],
            metrics,
        )


class Nothing(NLLLoss):
    def __call__(self, tokens: Any, totals: Totals) -> Any:
        loss, metrics = super().__call__(tokens, totals)
        return loss * 0.0, metrics


@pytest.mark.parametrize("more", [{}, {"offload_optimizer": "cpu"}], ids=["here", "offloaded"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["full", "bfloat16"])
def test_a_bad_gradient_on_one_rank_leaves_all_untouched(
    ranks: Ranks, stage: int, kind: str, more: dict[str, str]
) -> None:
    zero = many(ranks, stage, kind, more=more)
    update(zero, make_samples(LENGTHS))
    before = frozen(zero.state())
    assert update(zero, make_samples(LENGTHS), BadOnOneRow())["train/skipped"] == 1
    masked = [s.with_(trained=torch.zeros_like(s.trained)) for s in make_samples(LENGTHS)]
    for nothing in (
        update(zero, masked),
        update(zero, []),
        update(zero, make_samples(LENGTHS), Nothing()),
    ):
        assert nothing["train/empty"] == 1 and nothing["train/grad_norm"] == 0
    after = zero.state()
    assert after.meta.pop("steps") == before.meta.pop("steps") + 4 and identical(before, after)
    assert update(zero, make_samples(LENGTHS))["train/skipped"] == 0
    zero.close()


OFFLOADED = [
    (2, {"offload_optimizer": "cpu"}),
    (3, {"offload_optimizer": "cpu"}),
    (3, {"offload_optimizer": "cpu", "offload_parameters": "cpu"}),
]


@pytest.mark.parametrize(("stage", "more"), OFFLOADED)
@pytest.mark.parametrize("kind", ["full", "bfloat16"])
def test_offload_changes_nothing_but_rounding(
    ranks: Ranks, stage: int, more: dict[str, str], kind: str
) -> None:
    plain, moved = (
        many(ranks, stage, kind, learning_rate=1e-2, max_grad_norm=0.5, more=m) for m in ({}, more)
    )
    for seed in range(3):
        found, again = (
            update(b, make_samples(LENGTHS, seed), policy_loss()) for b in (plain, moved)
        )
        assert again.pop("train/grad_norm") == pytest.approx(
            found.pop("train/grad_norm"), rel=1e-6
        ) and again == pytest.approx(found, rel=1e-5)
    a = plain.state()
    b = moved.state()
    assert a.tensors.keys() == b.tensors.keys() and relative(b.tensors, a.tensors) < 1e-6
    moved.load(a)
    assert identical(moved.state(), a)
    plain.close(), moved.close()


@pytest.mark.parametrize("stage", STAGES)
def test_a_loaded_adapter_is_its_own_reference(ranks: Ranks, stage: int) -> None:
    """The reference is the adapter as it was loaded, before and after steps; for that the rank
    keeps a copy of the model.
    """
    local = one("loaded")
    zero = many(ranks, stage, "loaded", learning_rate=1e-2)
    start = pack(make_samples(LENGTHS), 64)
    local.annotate(start, frozenset({"old"}))
    for _ in range(2):
        batches = pack(make_samples(LENGTHS), 64)
        zero.annotate(batches, frozenset({"reference", "old"}))
        for found, wanted in zip(batches, start, strict=True):
            assert torch.allclose(found.streams["reference"], wanted.streams["old"], atol=1e-4)
        update(zero, make_samples(LENGTHS, 1), policy_loss())
    assert not torch.allclose(batches[0].streams["old"], start[0].streams["old"], atol=1e-2)
    zero.close()


@pytest.mark.parametrize("stage", STAGES)
def test_the_load_of_a_router_is_balanced(ranks: Ranks, stage: int) -> None:
    """The same micro-batches in one process: the same load-balancing loss, and the same
    gradient.
    """
    local = one("experts")
    zero = many(ranks, stage, "experts")
    metrics, again = (
        update(backend, make_samples(LENGTHS), policy_loss(), 1) for backend in (local, zero)
    )
    assert metrics["train/router_aux_loss"] > 0.1 and again == pytest.approx(
        metrics, rel=1e-4, abs=1e-6
    )
    assert relative(gradient(zero.state()), gradient(local.state())) < 1e-5
    zero.close()


@pytest.mark.parametrize("stage", STAGES)
def test_a_critic_in_float32(ranks: Ranks, stage: int) -> None:
    local = one("critic", False, learning_rate=1e-2)
    zero = many(ranks, stage, "critic", False, learning_rate=1e-2)
    samples = make_samples(LENGTHS)
    loss = ValueLoss(0.2)
    for _ in range(3):
        found = []
        for backend in (local, zero):
            batches = pack(samples, 40)
            backend.annotate(batches, frozenset({"values"}))
            for batch in batches:
                batch.streams["returns"] = batch.streams["advantages"]
            metrics = backend.forward_backward(batches, loss, Totals.of(batches, 32))
            found.append(
                (
                    {**metrics, **backend.step().metrics()},
                    torch.cat([b.streams["values"] for b in batches]),
                )
            )
        assert found[1][0] == pytest.approx(found[0][0], rel=1e-3, abs=1e-6) and torch.allclose(
            found[0][1], found[1][1], atol=1e-4
        )
    assert float(found[0][1].abs().max()) > 1e-3  # it has learned to say something
    zero.close()


def first_moments(shard: DeepSpeedWorker) -> float:
    return float(shard.optimizer.moment("value_head.weight", "exp_avg").abs().sum())


class Values(ValueLoss):
    def __call__(self, tokens: Any, totals: Totals) -> Any:
        loss = (tokens.values - 1.0).square().sum() / 10
        return loss + 0.0 * tokens.logprobs.sum(), {}

    reads = frozenset({"logprobs", "values"})


@pytest.mark.parametrize("more", [{}, {"offload_optimizer": "cpu"}], ids=["here", "offloaded"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_weight_without_a_gradient_keeps_none_of_the_last_batch(
    ranks: Ranks, stage: int, more: dict[str, str]
) -> None:
    """The value head is trained in the first batch and not in the second: its moment
    only decays.
    """
    zero = many(ranks, stage, "head", False, more=more)
    update(zero, make_samples(LENGTHS), Values(None))
    before = ranks.call(zero.id, first_moments)[0]
    update(zero, make_samples(LENGTHS))
    assert before > 0 and ranks.call(zero.id, first_moments)[0] == pytest.approx(
        0.9 * before, rel=1e-5
    )
    zero.close()


def test_a_head_in_low_precision_is_refused() -> None:
    # the ranks are of no use afterwards
    with Ranks.open(2, "cpu") as own, pytest.raises(InputError, match="model.dtype"):
        many(own, 2, "low critic", False)
