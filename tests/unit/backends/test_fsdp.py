"""Two processes that share the weights against one: the same log-probs, gradients, steps and
states. One pair of ranks for all tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from helpers.split_backends import LENGTHS, frozen, identical, load, policy_loss, summed, update
from helpers.tiny_runs import EVAL, LORA, launch, lines, tensors
from helpers.toys import gradients, make_samples, relative, train_config
from reinforge.algorithms.losses.supervised import NLLLoss
from reinforge.algorithms.losses.value import ValueLoss
from reinforge.backends.distributed.dispatch import dispatch_packs, split_evenly
from reinforge.backends.distributed.ranks import Ranks
from reinforge.backends.fsdp.backend import FsdpBackend
from reinforge.backends.local import LocalBackend
from reinforge.config.algorithm import ReferenceConfig
from reinforge.core.backend import Backend, State
from reinforge.core.batch import Batch, Totals, pack
from reinforge.core.errors import InputError

KINDS = ("full", "tied", "lora", "bfloat16", "checkpointed")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks.open(2, "cpu") as opened:
        yield opened


def both(
    ranks: Ranks, kind: str = "full", reference: Any = True, **changes: Any
) -> tuple[LocalBackend, FsdpBackend]:
    cfg = train_config(**changes)
    settings = {"total_steps": 10, "temperature": 0.8, "reference": reference}
    return LocalBackend(load(kind), cfg, **settings), FsdpBackend(
        ranks, partial(load, kind), cfg, full=load(kind), **settings
    )


def gradient_of(backend: Any) -> dict[str, torch.Tensor]:
    if isinstance(backend, LocalBackend):
        return gradients(backend)
    return backend.ranks.call(backend.id, summed)[0]


def one_pass(
    backend: Any, samples: list[Any], budget: int, loss: Any
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    batches = pack(samples, budget, share=True)
    backend.annotate(batches, loss.needs)
    metrics = backend.forward_backward(batches, loss, Totals.of(batches, 32))
    found = gradient_of(backend)
    backend.load(backend.state()) if isinstance(backend, FsdpBackend) else backend.optimizer.zero()
    return found, metrics


# ---- dealing ----


def test_packs_are_dealt_fairly() -> None:
    shares = dispatch_packs([7, 100, 50, 60, 90, 8], 3)
    assert [[i for i, counts in share] for share in shares] == [[1, 0], [4, 5], [3, 2]]
    assert all(counts for share in shares for _, counts in share)
    shares = dispatch_packs([5, 9], 4)  # two ranks have nothing of their own
    assert sorted(shares) == [[(0, False)], [(0, False)], [(0, True)], [(1, True)]]


def test_a_pack_is_cut_where_ranks_would_be_idle() -> None:
    samples = make_samples(LENGTHS)
    (batch,) = pack(samples, 10_000)
    (parts,) = split_evenly([[batch]], 2)
    assert len(parts) == 2 and [s.uid for p in parts for s in p.samples] == [
        s.uid for s in batch.samples
    ]
    assert max(p.n_tokens for p in parts) <= 0.65 * batch.n_tokens
    assert [len(p) for p in split_evenly([[Batch.pack(samples[:1])]], 2)] == [
        1
    ]  # one row cannot be cut
    (pairs,) = split_evenly([[Batch.pack(samples[:4])]], 2, unit=2)
    assert [len(p.samples) for p in pairs] == [2, 2]


# ---- the contract ----


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_and_metrics_are_those_of_one_process(ranks: Ranks, kind: str) -> None:
    """Whatever the budget: one pack for two ranks, an odd number of packs, one row per pack."""
    local, sharded = both(ranks, kind)
    assert isinstance(sharded, Backend)
    samples = make_samples(LENGTHS)
    loss = policy_loss()
    samples[4] = samples[4].with_(trained=torch.zeros_like(samples[4].trained))
    want, metrics = one_pass(local, samples, 10_000, loss)
    exact = kind != "bfloat16"
    for budget in (10_000, 40, 1):
        found, again = one_pass(sharded, samples, budget, loss)
        assert relative(found, want) < (1e-6 if exact else 2e-2), budget
        assert again == pytest.approx(
            metrics, rel=1e-4 if exact else 0.1, abs=1e-6 if exact else 0.05
        )
    sharded.close()


@pytest.mark.parametrize("kind", ["full", "lora", "bfloat16"])
def test_steps_and_state_are_those_of_one_process(ranks: Ranks, kind: str) -> None:
    """Rate, clipping, norm, decay: after three steps the two checkpoints hold the same names, types
    and values.
    """
    settings: dict[str, Any] = {
        "learning_rate": 1e-2,
        "schedule": {"kind": "cosine", "warmup": 2},
        "optimizer": {"weight_decay": 0.1},
        "max_grad_norm": 0.5,
    }
    local, sharded = both(ranks, kind, **settings)
    for seed in range(3):
        one, two = (update(b, make_samples(LENGTHS, seed), policy_loss()) for b in (local, sharded))
        assert two == pytest.approx(
            one, rel=2e-3 if kind != "bfloat16" else 0.2, abs=1e-5 if kind != "bfloat16" else 0.05
        )
    a = local.state()
    b = sharded.state()
    assert a.meta == b.meta and a.tensors.keys() == b.tensors.keys()
    assert {k: (t.dtype, t.shape) for k, t in a.tensors.items()} == {
        k: (t.dtype, t.shape) for k, t in b.tensors.items()
    }
    exp = [k for k in a.tensors if k.endswith("exp_avg")]
    assert relative({k: b.tensors[k] for k in exp}, {k: a.tensors[k] for k in exp}) < (
        1e-3 if kind != "bfloat16" else 0.1
    )
    sharded.close()


@pytest.mark.parametrize("kind", ["full", "lora", "bfloat16"])
def test_the_engine_gets_the_weights_that_train(ranks: Ranks, kind: str) -> None:
    _, sharded = both(ranks, kind, learning_rate=1e-2)
    batch = Batch.pack(make_samples(LENGTHS))
    for _ in range(2):
        update(sharded, make_samples(LENGTHS))
        sharded.annotate([batch], frozenset({"old"}))
        assert sharded.full is not None and sharded.weights().module is sharded.full.module
        own = dict(sharded.full.module.named_parameters())
        state = sharded.state()
        assert all(
            torch.equal(own[k.removeprefix("model/")], t)
            for k, t in state.tensors.items()
            if k.startswith("model/")
        )
        with torch.no_grad():
            served = sharded.full.logprobs(batch, temperature=0.8)[0]  # type: ignore[attr-defined]
        assert float((served - batch.streams["old"]).abs().max()) < (
            2e-5 if kind != "bfloat16" else 0.2
        )
    sharded.close()


@pytest.mark.parametrize("kind", ["full", "lora", "bfloat16"])
def test_state_continues_bit_for_bit_and_on_other_numbers_of_ranks(ranks: Ranks, kind: str) -> None:
    """Four steps against two, a new backend, and two more: identical.

    By way of one process (2, 1, 2 ranks): equal but for rounding.
    """
    settings = {"learning_rate": 1e-3, "optimizer": {"weight_decay": 0.01}}
    rows = [make_samples(LENGTHS, seed) for seed in range(4)]
    local, whole = both(ranks, kind, **settings)
    losses = [update(whole, r)["sft/loss"] for r in rows]
    end = frozen(whole.state())
    whole.load(both_start := frozen(local.state()))
    assert identical(whole.state(), both_start)  # moments and gradients of the first life are gone
    for r in rows[:2]:
        update(whole, r)
    middle = frozen(whole.state())
    _, second = both(ranks, kind, **settings)
    update(second, rows[3])
    second.load(middle)
    assert identical(second.state(), middle)
    assert [update(second, r)["sft/loss"] for r in rows[2:]] == losses[2:]
    assert identical(second.state(), end)
    local.load(middle)
    update(local, rows[2])
    second.load(frozen(local.state()))
    assert update(second, rows[3])["sft/loss"] == pytest.approx(
        losses[3], rel=1e-5 if kind != "bfloat16" else 1e-2
    )
    with pytest.raises(InputError, match="another model"):
        second.load(State({"model/x": torch.zeros(2)}, middle.meta))
    whole.close(), second.close()


class BadOnOneRow(NLLLoss):
    """NaN in the pack that holds the longest row, which is on one rank only."""

    def __call__(self, tokens: Any, totals: Totals) -> Any:
        loss, metrics = super().__call__(tokens, totals)
        return (
            loss + (float("nan") if int(tokens.lengths.max()) == 29 else 0.0) * tokens.logprobs[0],
            metrics,
        )


def test_a_bad_gradient_on_one_rank_leaves_all_untouched(ranks: Ranks) -> None:
    _, sharded = both(ranks)
    update(sharded, make_samples(LENGTHS))
    before = frozen(sharded.state())
    assert update(sharded, make_samples(LENGTHS), BadOnOneRow())["train/skipped"] == 1
    masked = [s.with_(trained=torch.zeros_like(s.trained)) for s in make_samples(LENGTHS)]
    assert update(sharded, masked)["train/empty"] == 1 and update(sharded, [])["train/empty"] == 1
    after = sharded.state()
    assert after.meta.pop("steps") == before.meta.pop("steps") + 3 and identical(before, after)
    assert update(sharded, make_samples(LENGTHS))["train/skipped"] == 0
    sharded.close()


def test_a_critic_and_its_whole_head(ranks: Ranks) -> None:
    local, sharded = both(ranks, "critic", reference=False, learning_rate=1e-2)
    assert sharded.worker.optimizer.whole == {"score.weight"}
    samples = make_samples(LENGTHS)
    loss = ValueLoss(0.2)
    for _ in range(3):
        found = []
        for backend in (local, sharded):
            batches = pack(samples, 40)
            backend.annotate(batches, frozenset({"values"}))
            for batch in batches:
                batch.streams["returns"] = batch.streams["advantages"]
            metrics = backend.forward_backward(batches, loss, Totals.of(batches, 32))
            found.append(
                (
                    gradient_of(backend),
                    {**metrics, **backend.step().metrics()},
                    torch.cat([b.streams["values"] for b in batches]),
                )
            )
        assert relative(found[1][0], found[0][0]) < 1e-4 and found[1][1] == pytest.approx(
            found[0][1], rel=1e-3, abs=1e-6
        )
        assert torch.allclose(found[0][2], found[1][2], atol=1e-4)
    assert float(found[0][2].abs().max()) > 1e-3  # it has learned to say something
    sharded.close()


def test_what_follows_the_weights(ranks: Ranks) -> None:
    """A moving reference and an average: as in one process, in the checkpoint, and swapped in and
    out bit for bit.
    """
    kind = ReferenceConfig(kind="ema", decay=0.5, every=2)
    local, sharded = both(ranks, "full", kind, ema=0.9, learning_rate=1e-2)
    assert local.parts().keys() == sharded.parts().keys() == {"reference", "ema"}
    for seed in range(3):
        for backend in (local, sharded):
            update(backend, make_samples(LENGTHS, seed), policy_loss())
    one, two = (pack(make_samples(LENGTHS), 64) for _ in range(2))
    for name, part in sharded.parts().items():
        theirs = local.parts()[name].state()
        mine = part.state()
        assert mine.meta == theirs.meta and relative(mine.tensors, theirs.tensors) < 1e-4
        part.load(mine)
        assert identical(part.state(), mine)
    before = frozen(sharded.state())
    assert local.ema is not None and sharded.ema is not None
    for backend, batches in ((local, one), (sharded, two)):
        backend.annotate(batches, frozenset({"reference"}))
        with backend.ema.swapped():  # type: ignore[union-attr]
            backend.annotate(batches, frozenset({"old"}))
    for a, b in zip(one, two, strict=True):
        assert torch.allclose(a.streams["old"], b.streams["old"], atol=1e-3) and torch.allclose(
            a.streams["reference"], b.streams["reference"], atol=1e-3
        )
    assert identical(sharded.state(), before)
    sharded.close()


def test_a_loaded_adapter_is_its_own_reference(ranks: Ranks) -> None:
    """Cut weights too: the reference is the adapter as it was loaded, in the layers and beside
    them, before and after steps.
    """
    local, sharded = both(ranks, "loaded", learning_rate=1e-2)
    start = pack(make_samples(LENGTHS), 64)
    local.annotate(start, frozenset({"old"}))
    for _ in range(2):
        batches = pack(make_samples(LENGTHS), 64)
        sharded.annotate(batches, frozenset({"reference", "old"}))
        for found, wanted in zip(batches, start, strict=True):
            assert torch.allclose(found.streams["reference"], wanted.streams["old"], atol=1e-4)
        update(sharded, make_samples(LENGTHS, 1), policy_loss())
    assert not torch.allclose(batches[0].streams["old"], start[0].streams["old"], atol=1e-2)
    assert sharded.parts() == {}
    sharded.close()


def test_offloaded_masters(ranks: Ranks) -> None:
    _, plain = both(ranks, "bfloat16", learning_rate=1e-2)
    _, moved = both(ranks, "bfloat16", learning_rate=1e-2, optimizer={"offload": True})
    for seed in range(2):
        assert update(plain, make_samples(LENGTHS, seed)) == update(
            moved, make_samples(LENGTHS, seed)
        )
    assert identical(plain.state(), moved.state())
    plain.close(), moved.close()


# ---- whole runs ----


@pytest.mark.parametrize(
    ("algorithm", "more", "sections"),
    [
        ("sft", ("train.ema=0.9",), {}),
        ("grpo", ("algorithm.kl.coefficient=0.1", "algorithm.epochs=2"), {}),
        ("grpo", (), LORA),
        ("ppo", (), {"critic": {}}),
        ("ppo", (), {"critic": {"shared": True}}),
    ],
)
def test_a_run_is_that_of_one_process(
    ranks: Ranks, make: Any, algorithm: str, more: tuple[str, ...], sections: dict[str, Any]
) -> None:
    """Rollouts, rewards and steps; then half of it on ranks and the rest in one process, and the
    other way round.
    """
    held = EVAL if algorithm == "sft" else None
    sharded = ("train.backend=fsdp", "train.ranks=2")
    runs = {
        name: make(name, algorithm, *more, *keys, **sections)
        for name, keys in (("one", ()), ("two", sharded))
    }
    for cfg in runs.values():
        launch(cfg, eval_data=held)
    watched = (
        "train/loss",
        "train/grad_norm",
        "reward/mean",
        "eval/loss",
        "policy/kl",
        "tokens/trained",
        "critic/loss",
    )
    log = {
        name: [{k: v for k, v in line.items() if k in watched} for line in lines(cfg)]
        for name, cfg in runs.items()
    }
    assert len(log["one"]) >= 3 and all(
        b == pytest.approx(a, rel=1e-3, abs=1e-5)
        for a, b in zip(log["one"], log["two"], strict=True)
    )
    theirs = tensors(runs["one"])
    mine = tensors(runs["two"])
    assert mine.keys() == theirs.keys()
    trained = [k for k in theirs if k.startswith("model/")]
    assert relative({k: mine[k] for k in trained}, {k: theirs[k] for k in trained}) < 1e-4
    if algorithm == "ppo" or sections:
        return
    launch(make("mixed", algorithm, "train.steps=1", *more, *sharded, **sections), eval_data=held)
    launch(make("mixed", algorithm, "train.steps=2", *more, **sections), eval_data=held)
    last = make("mixed", algorithm, *more, *sharded, **sections)
    launch(last, eval_data=held)
    found = tensors(last)
    assert relative({k: found[k] for k in trained}, {k: theirs[k] for k in trained}) < 1e-4


SURROGATE = """
import torch

def surrogate(logprobs, old, advantages, sequence):
    return -(logprobs - old).exp() * advantages, {"mine": torch.full_like(logprobs, 3.0)}
"""


def test_a_function_from_a_file_reaches_the_ranks(ranks: Ranks, make: Any, tmp_path: Any) -> None:
    (tmp_path / "parts.py").write_text(SURROGATE)
    cfg = make(
        "own",
        "grpo",
        f"algorithm.surrogate={tmp_path / 'parts.py'}:surrogate",
        "train.backend=fsdp",
        "train.steps=1",
    )
    launch(cfg)
    assert lines(cfg)[0]["policy/mine"] == pytest.approx(3.0)
