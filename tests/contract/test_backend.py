"""What every backend must do: one gradient however the batch is cut, one state that holds
everything, no step on nonsense.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from helpers.split_backends import LENGTHS, frozen, identical, load, policy_loss, update
from helpers.toys import gradients, make_samples, parameters, relative, train_config
from reinforge.algorithms.losses.policy import PolicyLoss
from reinforge.algorithms.losses.supervised import NLLLoss
from reinforge.algorithms.parts.reduce import REDUCERS
from reinforge.algorithms.parts.surrogates import ppo_clip
from reinforge.backends.local import LocalBackend
from reinforge.core.backend import Backend
from reinforge.core.batch import Batch, Totals, pack
from reinforge.core.sample import Sample


@dataclass
class Case:
    make: Callable[..., Any]  # (seed=0, **TrainConfig fields) -> backend with a reference
    exact: bool = True  # float32 throughout


def _local(kind: str, seed: int = 0, temperature: float = 0.8, **changes: Any) -> LocalBackend:
    return LocalBackend(
        load(kind, seed=seed),
        train_config(**changes),
        total_steps=10,
        temperature=temperature,
        reference=True,
    )


CASES = {
    kind: Case(partial(_local, kind), kind != "bfloat16") for kind in ("full", "lora", "bfloat16")
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def one_pass(
    backend: Any, samples: list[Sample], budget: int, loss: Any
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    batches = pack(samples, budget)
    backend.annotate(batches, loss.needs)
    metrics = backend.forward_backward(batches, loss, Totals.of(batches, 32))
    found = gradients(backend)
    backend.optimizer.zero()
    return found, metrics


def test_is_a_backend(case: Case) -> None:
    assert isinstance(case.make(), Backend)


@pytest.mark.parametrize("reduce", list(REDUCERS))
def test_gradient_does_not_depend_on_the_cut(case: Case, reduce: str) -> None:
    """Any budget and any order: the same gradient and the same metrics."""
    backend = case.make()
    loss = policy_loss(reduce=reduce)
    samples = make_samples(LENGTHS)
    # masked: counts nowhere
    samples[4] = samples[4].with_(trained=torch.zeros_like(samples[4].trained))
    want, metrics = one_pass(backend, samples, 10_000, loss)
    limit = 1e-6 if case.exact else 2e-2
    for budget, order in ((1, 1), (16, 1), (40, -1), (64, 1), (10_000, -1)):
        found, again = one_pass(backend, samples[::order], budget, loss)
        assert relative(found, want) < limit, f"budget {budget}"
        assert again == pytest.approx(
            metrics, rel=1e-4 if case.exact else 0.1, abs=1e-6 if case.exact else 0.05
        )
    assert float(torch.cat([g.flatten() for g in want.values()]).norm()) > 1e-3


def test_mean_of_means_would_be_seen(case: Case) -> None:
    """Dividing by what is in the micro-batch instead is wrong by far more than the
    tolerance above.
    """
    backend = case.make()
    samples = make_samples(LENGTHS)
    want, _ = one_pass(backend, samples, 10_000, NLLLoss())
    batches = pack(samples, 24)
    for batch in batches:
        backend.forward_backward([batch], NLLLoss(), Totals.of([batch]))
    wrong = {name: g / len(batches) for name, g in gradients(backend).items()}
    assert relative(wrong, want) > 0.05


def test_untrained_tokens_have_no_gradient(case: Case) -> None:
    """A tool answer inside an episode is context only: its ids as targets get no gradient, an
    all-masked batch gives none at all.
    """
    backend = case.make()
    sample = make_samples((20,))[0]
    hole = sample.trained.clone()
    hole[8:14] = False
    with_tool = sample.with_(trained=hole)
    found, metrics = one_pass(backend, [with_tool], 64, NLLLoss())
    parts = {k: torch.zeros_like(v) for k, v in found.items()}
    for t in hole.nonzero()[:, 0].tolist():  # token by token, each as the only target
        only = torch.zeros_like(hole)
        only[t] = True
        batch = Batch.pack([sample.with_(trained=only)])
        backend.forward_backward([batch], NLLLoss(), Totals(int(hole.sum()), 1, 32, {}))
        for name, g in gradients(backend).items():
            parts[name] += g
        backend.optimizer.zero()
    assert relative(found, parts) < (1e-5 if case.exact else 5e-2)
    nothing = Batch.pack([sample.with_(trained=torch.zeros_like(hole))])
    metrics = backend.forward_backward([nothing], NLLLoss(), Totals.of([nothing]))
    assert metrics == {} and gradients(backend) == {}


def test_zero_gradient_leaves_everything_untouched(case: Case) -> None:
    backend = case.make(learning_rate=0.1, optimizer={"weight_decay": 0.1})
    samples = make_samples(LENGTHS)
    update(backend, samples)
    before = frozen(backend.state())
    equal = [s.with_(streams={"advantages": torch.zeros(len(s.tokens))}) for s in samples]
    loss = PolicyLoss(ppo_clip, REDUCERS["token_mean"])
    for batch in (equal, [s.with_(trained=torch.zeros_like(s.trained)) for s in samples], []):
        metrics = update(backend, batch, loss)
        assert (metrics["train/empty"], metrics["train/skipped"], metrics["train/grad_norm"]) == (
            1,
            0,
            0,
        )
    after = backend.state()
    assert after.meta.pop("steps") == before.meta.pop("steps") + 3 and identical(before, after)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_gradient_leaves_everything_untouched(case: Case, bad: float) -> None:
    backend = case.make(max_grad_norm=1.0)
    samples = make_samples(LENGTHS)
    update(backend, samples)
    before = frozen(backend.state())

    class Bad(NLLLoss):
        def __call__(self, tokens, totals):  # type: ignore[no-untyped-def]
            loss, metrics = super().__call__(tokens, totals)
            return loss + bad * tokens.logprobs[0], metrics

    metrics = update(backend, samples, Bad())
    assert metrics["train/skipped"] == 1 and metrics["train/empty"] == 0
    after = backend.state()
    assert after.meta.pop("steps") == before.meta.pop("steps") + 1 and identical(before, after)
    healthy = update(backend, samples)  # and the bad gradient is gone
    assert healthy["train/skipped"] == 0 and torch.isfinite(
        torch.tensor(healthy["train/grad_norm"])
    )


def test_state_continues_bit_for_bit(case: Case) -> None:
    """Four updates in a row, against two, a state moved to a new backend of another seed, and two
    more.
    """
    settings = {
        "learning_rate": 1e-2,
        "schedule": {"kind": "cosine", "warmup": 2},
        "optimizer": {"weight_decay": 0.01},
    }
    rows = [make_samples(LENGTHS, seed) for seed in range(4)]
    whole = case.make(**settings)
    losses = [update(whole, r)["sft/loss"] for r in rows]
    first = case.make(**settings)
    for r in rows[:2]:
        update(first, r)
    moved = frozen(first.state())
    second = case.make(**settings)
    update(second, rows[3])  # used before: nothing of it may remain
    second.load(moved)
    assert identical(second.state(), moved)
    assert [update(second, r)["sft/loss"] for r in rows[2:]] == losses[2:]
    assert identical(second.state(), whole.state())
    batch = pack(rows[0], 64)
    for backend in (whole, second):
        backend.annotate(batch, frozenset({"old"}))
        batch[0].streams[f"of {id(backend)}"] = batch[0].streams["old"]
    assert torch.equal(batch[0].streams[f"of {id(whole)}"], batch[0].streams[f"of {id(second)}"])


def test_a_state_before_the_first_step_is_complete(case: Case) -> None:
    """Loading it into a backend that has trained also forgets its moments and any gradient that is
    pending.
    """
    rows = make_samples(LENGTHS)
    fresh = case.make()
    used = case.make()
    start = frozen(fresh.state())
    update(used, rows)
    used.forward_backward(pack(rows, 64), NLLLoss(), Totals.of(pack(rows, 64)))
    used.load(start)
    assert identical(used.state(), start)
    update(used, rows)
    update(fresh, rows)
    assert identical(used.state(), fresh.state())


def test_state_is_plain_and_complete(case: Case) -> None:
    import json

    backend = case.make()
    update(backend, make_samples(LENGTHS))
    state = backend.state()
    assert json.loads(json.dumps(state.meta)) == state.meta
    trained = {name for name, p in backend.model.module.named_parameters() if p.requires_grad}
    assert {k.removeprefix("model/") for k in state.tensors if k.startswith("model/")} == trained
    for name in trained:
        assert (
            f"optimizer/{name}/exp_avg" in state.tensors
            and f"optimizer/{name}/exp_avg_sq" in state.tensors
        )
    assert not any(t.requires_grad for t in state.tensors.values())


def test_small_learning_rates_move_the_weights(case: Case) -> None:
    """lr 1e-6 a hundred times: in bf16 each step alone would round away; together they are seen."""
    backend = case.make(learning_rate=1e-6)
    samples = make_samples((20,))
    before = {k: m.detach().clone() for k, m in backend.optimizer.masters.items()}
    module_before = parameters(backend.model.module)
    for _ in range(3):
        update(backend, samples)
    moved = torch.cat(
        [(m.detach() - before[k]).flatten() for k, m in backend.optimizer.masters.items()]
    )
    assert 5e-7 < float(moved.abs().median()) < 4e-6
    for name, master in backend.optimizer.masters.items():
        assert torch.equal(
            backend.optimizer.parameters[name].detach(),
            master.detach().to(backend.optimizer.parameters[name].dtype),
        )
    if not case.exact:
        now = parameters(backend.model.module)
        # the bf16 copy hardly shows it
        assert sum(int((now[k] != module_before[k]).sum()) for k in now) < 0.2 * len(moved)


def test_schedule_and_clipping_per_optimizer_step(case: Case) -> None:
    """The rate follows optimizer steps, skipped and empty ones included, not micro-batches; the
    norm is reported before clipping.
    """
    backend = case.make(
        learning_rate=1.0e-4, schedule={"kind": "linear", "warmup": 2}, max_grad_norm=1e-3
    )
    rates = []
    for seed in range(4):
        batches = pack(make_samples(LENGTHS, seed), 16)
        assert len(batches) > 3
        backend.forward_backward(batches, NLLLoss(), Totals.of(batches))
        rates.append(backend.step().learning_rate)
    rates.append(backend.step().learning_rate)  # empty
    assert rates == pytest.approx([0.5e-4, 1e-4, 1e-4, 0.875e-4, 0.75e-4])


def test_annotate_is_the_policy_at_its_temperature(case: Case) -> None:
    """Before any step old = reference = current at the rollout temperature, without gradient."""
    backend = case.make()
    batches = pack(make_samples(LENGTHS), 64)
    backend.annotate(batches, frozenset({"old", "reference"}))
    with torch.no_grad():
        for batch in batches:
            now = backend.model.logprobs(batch, temperature=0.8)[0]
            assert torch.equal(batch.streams["old"], now) and not batch.streams["old"].requires_grad
            if backend.frozen is not None:
                assert torch.equal(batch.streams["reference"], now)
            cold = backend.model.logprobs(batch, temperature=1.0)[0]
            assert float((now - cold).abs().max()) > 0.05


def test_weights_are_the_module_itself(case: Case) -> None:
    backend = case.make()
    weights = backend.weights()
    assert weights.kind == "shared" and weights.module is backend.model.module
