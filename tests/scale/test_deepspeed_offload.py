"""What DeepSpeed's ZeRO has of its own: states in host memory, moments of weights without a
gradient, and what it refuses. The contract of backends is in test_backend_contract.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("deepspeed") is None:
    pytest.skip("pip install 'reinforge[deepspeed]'", allow_module_level=True)

from helpers.backend_contract import Bad, Zero, after_steps
from helpers.split_backends import LENGTHS, frozen, identical, load, policy_loss, update
from helpers.toys import make_samples, relative, train_config
from reinforge.algorithms.losses.supervised import NLLLoss
from reinforge.algorithms.losses.value import ValueLoss
from reinforge.backends.deepspeed.backend import DeepSpeedBackend
from reinforge.backends.deepspeed.worker import DeepSpeedWorker
from reinforge.backends.distributed.ranks import Ranks
from reinforge.backends.memory_model import gradient_bytes
from reinforge.core.batch import Totals, pack
from reinforge.core.errors import InputError

STAGES = (2, 3)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks.open(2, "cpu") as opened:
        yield opened


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


@pytest.mark.parametrize("stage", STAGES)
def test_buckets_and_overlap_change_when_and_not_what(ranks: Ranks, stage: int) -> None:
    plain = many(ranks, stage)
    own = {"overlap": True, "reduce_bucket": 700, "gather_bucket": 900}
    tuned = many(ranks, stage, more=own)
    for seed in range(2):
        samples = make_samples(LENGTHS, seed)
        want, found = update(plain, samples), update(tuned, samples)
        assert found == pytest.approx(want, rel=1e-5, abs=1e-7)
    engine = tuned.worker.optimizer.engine
    assert engine.zero_overlap_comm() and engine.zero_reduce_bucket_size() == 700
    assert relative(tuned.state().tensors, plain.state().tensors) < 1e-5
    plain.close(), tuned.close()


def forget_flags(shard: DeepSpeedWorker) -> None:
    """On rank 1, as if no weight had a gradient there."""
    if shard.member.rank == 1:
        zero = shard.optimizer.zero
        flags = zero.fp32_groups_has_gradients
        zero.fp32_groups_has_gradients = [[False] * len(group) for group in flags]


def test_stage_1_in_bfloat16_is_stage_2(ranks: Ranks) -> None:
    """By another optimizer of DeepSpeed's: gradients of packs are added up in float32 here as
    there, and ranks agree on their norm whatever each of them had.
    """
    one, two = (many(ranks, s, "bfloat16", learning_rate=1e-2, max_grad_norm=0.5) for s in (1, 2))
    for seed in range(3):
        batches = pack(make_samples(LENGTHS, seed), 24)
        assert len(batches) > 2
        found = []
        for backend in (one, two):
            backend.forward_backward(batches, NLLLoss(), Totals.of(batches, 32))
            if backend is one and seed:
                ranks.call(one.id, forget_flags)
            found.append(ranks.call(backend.id, "step", [()] * 2))
        (first, second), (want, _) = found
        assert first.grad_norm == second.grad_norm == pytest.approx(want.grad_norm, rel=1e-5)
        assert first.grad_norm > 0.5, "clipped"
    assert relative(one.state().tensors, two.state().tensors) < 1e-5
    one.close(), two.close()


def held_gradients(shard: DeepSpeedWorker) -> tuple[int, int]:
    """(bytes of gradients that a rank has, what it says that it has)."""
    zero = shard.optimizer.zero
    found = [p.grad for p in shard.optimizer.parameters.values() if p.grad is not None]
    if shard.cfg.deepspeed.stage == 1 and shard.itemsize == 2:
        found += zero.fp32_groups_gradients_flat
    elif shard.cfg.deepspeed.stage >= 2:
        grads = zero.averaged_gradients or zero.all_grad_tensors
        found += [t for group in grads.values() for t in group if t is not None]
    return sum(t.numel() * t.element_size() for t in found), gradient_bytes(shard.facts())


@pytest.mark.parametrize(
    ("stage", "kind", "each"),
    [(1, "full", 4), (1, "bfloat16", 6), (2, "full", 2), (2, "bfloat16", 2)],
)
def test_ranks_know_the_gradients_that_they_hold(
    ranks: Ranks, stage: int, kind: str, each: int
) -> None:
    """All of them below stage 2, by bytes of a weight. What a rank says has the largest gradient of
    16 bits beside its sums, before it is added, and no padding.
    """
    zero = many(ranks, stage, kind)
    batches = pack(make_samples(LENGTHS, 0), 24)
    zero.forward_backward(batches, NLLLoss(), Totals.of(batches, 32))
    facts = zero.worker.facts()
    learned = sum(p.numel() for p in load(kind).module.parameters())
    passing = facts.vocab * facts.hidden * 2 if (stage, kind) == (2, "bfloat16") else 0
    for held, said in ranks.call(zero.id, held_gradients):
        assert said == learned * each + passing
        assert held == pytest.approx(learned * each, rel=0.002)
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
    a = frozen(plain.state())
    b = moved.state()
    assert a.tensors.keys() == b.tensors.keys() and relative(b.tensors, a.tensors) < 1e-6
    moved.load(a)
    assert identical(moved.state(), a)
    assert update(moved, make_samples(LENGTHS), Bad(float("nan")))["train/skipped"] == 1
    assert update(moved, make_samples(LENGTHS), Zero())["train/empty"] == 1
    assert identical(moved.state(), after_steps(a, 2))
    assert update(moved, make_samples(LENGTHS))["train/skipped"] == 0
    plain.close(), moved.close()


def first_moments(shard: DeepSpeedWorker) -> float:
    return float(shard.optimizer.moment("value_head.weight", "exp_avg").abs().sum())


class Values(ValueLoss):
    def __call__(self, tokens: Any, totals: Totals) -> Any:
        loss = (tokens.values - 1.0).square().sum() / 10
        return loss + 0.0 * tokens.logprobs.sum(), {}

    reads = frozenset({"logprobs", "values"})


@pytest.mark.parametrize(
    ("stage", "more"),
    [(0, {}), *((stage, more) for stage in STAGES for more in ({}, {"offload_optimizer": "cpu"}))],
)
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


@pytest.mark.parametrize(
    ("stage", "kind", "where"),
    [(2, "low critic", "model.dtype"), (0, "bfloat16", "train.deepspeed.stage")],
)
def test_what_it_cannot_do_in_low_precision_is_refused(stage: int, kind: str, where: str) -> None:
    # the ranks are of no use afterwards
    with Ranks.open(2, "cpu") as own, pytest.raises(InputError) as refused:
        many(own, stage, kind, False)
    assert refused.value.where == where
