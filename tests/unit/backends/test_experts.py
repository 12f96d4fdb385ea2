"""What training does about experts: replay of the choices that were made when tokens were sampled,
and what it tells of their load.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.routed import with_routes
from helpers.toy_architectures import make_architecture
from helpers.toys import gradients, make_samples, relative, train_config
from reinforge.algorithms.losses.supervised import NLLLoss
from reinforge.backends.local import LocalBackend
from reinforge.checkpoint import store
from reinforge.config.adapter import AdapterConfig
from reinforge.core import routes
from reinforge.core.batch import Batch, Totals, pack
from reinforge.core.errors import InputError
from reinforge.core.metrics import Metric
from reinforge.core.sample import Sample
from reinforge.loops.expert_load import ExpertLoad
from reinforge.models.adapters import add_adapter
from reinforge.models.causal import CausalModel
from reinforge.models.router_bias import RouterBias
from reinforge.models.routing import Routers

KINDS = ("qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "gpt_oss", "granitemoe")
EXPERTS = 4


def loaded(kind: str = "qwen3_moe") -> CausalModel:
    return CausalModel(make_architecture(kind))


def backend_of(model: CausalModel, replay: str = "on", **changes: Any) -> LocalBackend:
    cfg = train_config(router_replay=replay, **changes)
    return LocalBackend(model, cfg, total_steps=10)


def one_pass(backend: Any, samples: Sequence[Sample], budget: int = 10_000, **how: Any) -> Any:
    batches = pack(samples, budget, **how)
    return backend.forward_backward(batches, NLLLoss(), Totals.of(batches))


@pytest.mark.parametrize("kind", KINDS)
def test_packed_is_what_each_sample_alone_gives(kind: str) -> None:
    """With replay, also through layers that are computed again in the backward pass."""
    samples = with_routes(make_samples([14, 9, 11]), loaded(kind))
    alone = backend_of(loaded(kind))
    found = one_pass(alone, samples, 1)
    again = loaded(kind)
    again.module.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    packed = backend_of(again)
    assert one_pass(packed, samples)["train/loss"] == pytest.approx(found["train/loss"], abs=1e-5)
    assert relative(gradients(packed), gradients(alone)) < 1e-5
    free = backend_of(loaded(kind), "off")
    one_pass(free, samples)
    assert relative(gradients(free), gradients(alone)) > 1e-3


def test_the_tokens_go_where_they_are_sent() -> None:
    """The share of every expert is that of the routes; the last token of each goes where it
    will.
    """
    model = loaded()
    backend = backend_of(model)
    samples = with_routes(make_samples([40, 30]), model)
    told = ExpertLoad()
    metrics = one_pass(backend, samples)
    for block in range(2):
        chosen = torch.cat([routes.wide(s.extras["routes"])[:-1, block] for s in samples])
        want = torch.bincount(chosen.flatten(), minlength=EXPERTS).double()
        found = [metrics[f"experts/{e}/{block}/load"] * 70 * 2 for e in range(EXPERTS)]
        assert (torch.tensor(found) - want).abs().max() <= 4 and sum(found) == pytest.approx(140)
    finished = told.finish(metrics)
    assert not any(name.endswith("/load") for name in finished)
    assert 1 <= finished["experts/load_max"] < 1.5 and finished["experts/dead"] == 0


def test_disagreement_is_counted() -> None:
    """Its own choices agree, random ones mostly do not; what is open is not counted."""
    model = loaded()
    samples = make_samples([14, 9])
    found = Routers.of(model)
    assert found is not None
    own = []
    for sample in samples:
        with torch.no_grad(), found.watched():
            model.states(Batch.pack([sample]))
            told = routes.narrow(found.taken(), EXPERTS)
        told[:3] = routes.opened(told, 3)
        own.append(sample.with_(extras={routes.NAME: told}))
    backend = backend_of(model, "count")
    assert one_pass(backend, own)["experts/disagreement"] == 0
    wrong = one_pass(backend, with_routes(samples, model))["experts/disagreement"]
    assert 0.5 < wrong < 1  # one of six pairs is the right one
    assert "experts/disagreement" not in one_pass(backend, samples)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("replay", ["count", "on", "differing"])
def test_nothing_disagrees_with_what_is_replayed(replay: str, dtype: torch.dtype) -> None:
    """Whatever the trainer would choose."""
    model = CausalModel(make_architecture("qwen3_moe").to(dtype))
    told = one_pass(backend_of(model, replay), with_routes(make_samples([14, 9]), model))
    assert 0.5 < told["experts/disagreement"] < 1
    left = told["experts/disagreement_left"]
    assert left == (told["experts/disagreement"] if replay == "count" else 0)


def test_log_probs_of_the_old_policy_are_replayed_and_those_of_the_reference_are_not() -> None:
    """The reference of an adapter is the same module, and does not see what is given to the
    policy.
    """
    model = CausalModel(
        add_adapter(
            make_architecture("qwen3_moe"), AdapterConfig(rank=3, targets=["q_proj"]), seed=0
        )
    )
    backend = LocalBackend(model, train_config(router_replay="on"), total_steps=10, reference=True)
    samples = with_routes(make_samples([14, 9]), model)
    (batch,) = pack(samples, 1000)
    backend.annotate([batch], frozenset({"old", "reference"}))
    (plain,) = pack([s.with_(extras={}) for s in samples], 1000)
    backend.annotate([plain], frozenset({"old", "reference"}))
    assert torch.equal(batch.streams["reference"], plain.streams["reference"])
    # lora starts at 0: without replay the policy is its reference
    assert torch.allclose(plain.streams["old"], plain.streams["reference"], atol=1e-6)
    assert (batch.streams["old"] - plain.streams["old"]).abs().max() > 1e-2
    with torch.no_grad():
        backend.experts.follow(batch)
        want, _ = model.logprobs(batch, temperature=1.0)
        backend.experts.follow(None)
    assert torch.equal(batch.streams["old"], want)


# ---- numbers for people ----


def loads(rows: list[list[float]]) -> dict[str, Any]:
    found = {
        f"experts/{e}/{b}/load": Metric(value)
        for b, row in enumerate(rows)
        for e, value in enumerate(row)
    }
    return {"train/loss": Metric(1.0), **found}


def test_load_by_hand() -> None:
    told = ExpertLoad()
    even = told.finish(loads([[0.25] * 4, [0.25] * 4]))
    assert even["experts/load_max"] == pytest.approx(1)
    assert even["experts/entropy"] == pytest.approx(1)
    assert even["experts/dead"] == 0 and "experts/drift" not in even and even["train/loss"] == 1
    odd = told.finish(loads([[0.5, 0.5, 0, 0], [0.25] * 4]))
    assert odd["experts/load_max"] == pytest.approx(2)
    assert odd["experts/entropy"] == pytest.approx((0.5 + 1) / 2)
    assert odd["experts/dead"] == pytest.approx(2 / 8)
    assert odd["experts/drift"] == pytest.approx(0.5 / 2)


def test_drift_goes_on_after_a_resume() -> None:
    first, second = ExpertLoad(), ExpertLoad()
    first.finish(loads([[0.5, 0.5, 0, 0]]))
    second.load(first.state())
    assert second.finish(loads([[0, 0, 0.5, 0.5]]))["experts/drift"] == pytest.approx(1)
    assert ExpertLoad().state().tensors == {}


# ---- the bias by which routers choose ----


def biases(model: CausalModel) -> list[torch.Tensor]:
    return [x for name, x in model.module.named_buffers() if name.endswith("correction_bias")]


def test_a_bias_moves_towards_an_even_load() -> None:
    """By the rate, up for those with fewer tokens than the mean and down for the others, counted
    over all micro-batches of the update.
    """
    model = loaded("deepseek_v3")
    backend = backend_of(model, "off", router_bias_rate=0.02, learning_rate=1e-9)
    (bias,) = biases(model)
    samples = make_samples([40, 30, 20])
    spread = []
    for _ in range(16):
        before = bias.clone()
        metrics = one_pass(backend, samples, 1)
        load = torch.tensor([metrics[f"experts/{e}/0/load"] for e in range(EXPERTS)])
        backend.step()
        assert torch.allclose(bias - before, 0.02 * (0.25 - load).sign(), atol=1e-6)
        spread.append(float(load.max() - load.min()))
    assert max(spread[-3:]) < 0.5 * spread[0]


def test_a_bias_is_part_of_the_state(tmp_path: Path) -> None:
    """It comes back with a checkpoint, and rounding to the precision of the model does not stop
    it.
    """
    first, second = (
        backend_of(
            CausalModel(make_architecture("deepseek_v3").to(torch.bfloat16)),
            "off",
            router_bias_rate=1e-3,
            learning_rate=1e-3,
        )
        for _ in range(2)
    )
    with torch.no_grad():
        biases(first.model)[0].fill_(1.0)
    first.experts.bias = RouterBias.of(first.model, first.experts.routers, 1e-3)
    samples = make_samples([14, 9])
    for _ in range(5):
        one_pass(first, samples)
        first.step()
    assert first.experts.bias is not None
    moved = first.experts.bias.tensors()
    assert all(0.001 < (x - 1.0).abs().max() <= 0.0051 for x in moved.values())
    store.save(tmp_path, 1, first.state(), {})
    second.load(store.load(store.steps(tmp_path)[0])[0])
    assert second.experts.bias is not None
    for name, x in second.experts.bias.tensors().items():
        assert torch.equal(x, moved[name])
    assert torch.equal(biases(second.model)[0], biases(first.model)[0])
    for backend in (first, second):
        one_pass(backend, samples)
        backend.step()
    assert torch.equal(biases(second.model)[0], biases(first.model)[0])


def test_a_pass_that_is_done_again_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory runs out after two of three packs, the whole pass is done again in other ones:
    every token has k assignments, and not more.
    """
    backend = backend_of(
        loaded("deepseek_v3"), "off", router_bias_rate=0.02, tokens_per_microbatch=30
    )
    plain = backend._micro
    lengths = [15, 14, 13, 12, 11, 10]
    done: list[int] = []

    def failing(batch: Batch, *rest: Any) -> Any:
        done.append(batch.n_tokens)
        if len(done) == 3:
            raise torch.OutOfMemoryError("no memory")
        return plain(batch, *rest)

    monkeypatch.setattr(backend, "_micro", failing)
    one_pass(backend, make_samples(lengths), 30)
    assert len(done) > 3 and backend.experts.bias is not None
    (block,) = backend.experts.bias.blocks
    assert float(block.tokens.sum()) == 2 * sum(lengths)


def test_routers_without_a_bias_refuse_its_rate() -> None:
    with pytest.raises(InputError, match=r"router_bias_rate: .*Qwen3MoeForCausalLM have no bias"):
        backend_of(loaded(), "off", router_bias_rate=0.001)
