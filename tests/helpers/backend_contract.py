"""What every backend must do, whoever computes: the gradient of one process however the batch is
cut, one state that holds everything, no step on nonsense.

A test module makes a subclass of `BackendContract` with its cases: tests/contract those that need
nothing but torch, tests/scale the others. A new backend is one more case, and every point of the
contract is then asked of it, but for what the compatibility table says that it does not do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, TypeVar

import pytest
import torch

from helpers.routed import with_routes
from helpers.split_backends import (
    LENGTHS,
    attributes_pass,
    frozen,
    identical,
    load,
    policy_loss,
    update,
)
from helpers.toys import make_samples, relative, train_config
from reinforge.algorithms.losses.policy import PolicyLoss
from reinforge.algorithms.losses.supervised import NLLLoss
from reinforge.algorithms.losses.value import ValueLoss
from reinforge.algorithms.parts.reduce import REDUCERS
from reinforge.algorithms.parts.surrogates import ppo_clip
from reinforge.backends.distributed.ranks import Ranks
from reinforge.backends.local import LocalBackend
from reinforge.checkpoint.tensors import within
from reinforge.config.algorithm import ReferenceConfig
from reinforge.config.rules.backends import BACKENDS
from reinforge.config.rules.table import No
from reinforge.config.train import TrainConfig
from reinforge.core.backend import Backend, State
from reinforge.core.batch import Batch, Totals, pack
from reinforge.core.errors import InputError
from reinforge.models.causal import CausalModel
from reinforge.models.packed import PackedModel
from reinforge.models.router_bias import BIASES, biases_of

Load = Callable[[], PackedModel]
Make = Callable[..., Any]  # (reference=True, **fields of TrainConfig) -> a backend
Test = TypeVar("Test", bound=Callable[..., Any])

MODELS: dict[str, Load] = {
    **{kind: partial(load, kind) for kind in ("full", "tied", "lora", "bfloat16", "checkpointed")},
    **{kind: partial(load, kind) for kind in ("loaded", "critic", "attributes", "experts")},
    # routers that choose by a bias: a buffer in the one, a parameter in the other
    **{kind: partial(load, kind) for kind in ("deepseek_v3", "ernie4_5_moe")},
    "biased": partial(load, "full", "qwen2"),
    "normed": partial(load, "full", "qwen3"),
    "unbounded": partial(load, "full", "mistral", sliding_window=None),
}
# what a backend must be able to do for a model or for a point of the contract: a key of the
# compatibility table
FEATURES = {
    "lora": "adapter",
    "loaded": "adapter",
    "critic": "critic",
    "attributes": "algorithm.name",
    "test_what_follows_the_weights": "train.ema",
    "test_biases_of_routers_follow_the_load": "train.router_bias_rate",
}


@dataclass(frozen=True)
class BackendCase:
    """One backend with one setting of it."""

    name: str
    column: str  # of the compatibility table
    # (what was started, how a model is loaded, the section `train`, the settings of LocalBackend)
    make: Callable[[Any, Load, TrainConfig, dict[str, Any]], Any]
    train: Mapping[str, Any] = field(default_factory=dict)  # fields of TrainConfig
    models: tuple[str, ...] = ()  # of which the gradient is looked at beside those of all cases
    # models and points of the contract that it does not do, and why
    cannot: Mapping[str, str] = field(default_factory=dict)

    def why_not(self, what: str) -> str | None:
        """Why a model, or a point of the contract, is none for it."""
        if what in self.cannot:
            return self.cannot[what]
        if what not in FEATURES:
            return None
        (feature,) = (f for f in BACKENDS.features if f.key == FEATURES[what])
        cell = feature.cells[self.column]
        return cell.why if isinstance(cell, No) else None


def of(*models: str, more: bool = False) -> Callable[[Test], Test]:
    """A point that is looked at with these models instead of one, and `more` with those of the
    case.
    """

    def mark(test: Test) -> Test:
        test.models = models  # type: ignore[attr-defined]
        test.more = more  # type: ignore[attr-defined]
        return test

    return mark


def on_one_process(_: None, load: Load, cfg: TrainConfig, settings: dict[str, Any]) -> LocalBackend:
    return LocalBackend(load(), cfg, **settings)


def on_ranks(
    kind: type[Any], ranks: Ranks, load: Load, cfg: TrainConfig, settings: dict[str, Any]
) -> Any:
    """A backend of the kind, whose rank 0 has a model to generate with where it is a policy."""
    return kind(ranks, load, cfg, full=load(), **settings)


class Bad(NLLLoss):
    """A loss that is not finite in the pack that holds the longest row: on one rank only, where
    there are several.
    """

    def __init__(self, value: float):
        super().__init__()
        self.value = value

    def __call__(self, tokens: Any, totals: Totals) -> Any:
        loss, metrics = super().__call__(tokens, totals)
        bad = self.value if int(tokens.lengths.max()) == max(LENGTHS) - 2 else 0.0
        return loss + bad * tokens.logprobs[0], metrics


class Zero(NLLLoss):
    """A loss whose gradient is 0."""

    def __call__(self, tokens: Any, totals: Totals) -> Any:
        loss, metrics = super().__call__(tokens, totals)
        return loss * 0.0, metrics


def gradient(backend: Any) -> dict[str, torch.Tensor]:
    """Of the first step: the first moment is a tenth of it."""
    return {k: 10 * t for k, t in backend.state().tensors.items() if k.endswith("/exp_avg")}


def after_steps(state: State, steps: int) -> State:
    """The state after steps that changed nothing."""
    return State(state.tensors, {**state.meta, "steps": state.meta["steps"] + steps})


def values_pass(backend: Any, samples: Sequence[Any]) -> tuple[dict[str, float], torch.Tensor]:
    """One step of a critic: what it reports, and the values before it."""
    batches = pack(samples, 40)
    backend.annotate(batches, frozenset({"values"}))
    for batch in batches:
        batch.streams["returns"] = batch.streams["advantages"]
    metrics = backend.forward_backward(batches, ValueLoss(0.2), Totals.of(batches, 32))
    values = torch.cat([b.streams["values"] for b in batches])
    return {**metrics, **backend.step().metrics()}, values


class BackendContract:
    """The points of the contract. `started` is what all cases of a class share: ranks, actors."""

    cases: ClassVar[Sequence[BackendCase]]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        point = metafunc.function
        asked = getattr(point, "models", ("full",))
        found = []
        reasons = []
        for case in self.cases:
            names = [*asked, *case.models] if getattr(point, "more", False) else asked
            for model in names:
                why = case.why_not(point.__name__) or case.why_not(model)
                if why is None:
                    found.append(pytest.param(case, model, id=f"{case.name}-{model}"))
                else:
                    reasons.append(f"{case.column}: {why}")
        if not found:
            found = [pytest.param(None, "", id="none", marks=pytest.mark.skip(reason=reasons[0]))]
        metafunc.parametrize(("case", "model"), found)

    @pytest.fixture(scope="class")
    def started(self) -> Iterator[Any]:
        yield None

    @pytest.fixture
    def make(self, started: Any, case: BackendCase, model: str) -> Iterator[Make]:
        """Backends of the case."""
        made: list[Any] = []

        def build(reference: bool | ReferenceConfig = True, **changes: Any) -> Any:
            cfg = train_config(**case.train, **changes)
            settings = {"total_steps": 10, "temperature": 0.8, "reference": reference}
            made.append(case.make(started, MODELS[model], cfg, settings))
            return made[-1]

        yield build
        for backend in made:
            if not isinstance(backend, LocalBackend):
                backend.close()

    @pytest.fixture
    def one(self, model: str) -> Make:
        """The same in one process: what every case is held against."""

        def build(reference: bool | ReferenceConfig = True, **changes: Any) -> LocalBackend:
            return LocalBackend(
                MODELS[model](),
                train_config(**changes),
                total_steps=10,
                temperature=0.8,
                reference=reference,
            )

        return build

    @pytest.fixture
    def exact(self, model: str) -> bool:
        """Whether everything is computed in float32."""
        return model != "bfloat16"

    # ---- gradients ----

    @of("full", "tied", "lora", "bfloat16", "checkpointed", more=True)
    def test_gradient_and_metrics_are_those_of_one_process(
        self, make: Make, one: Make, exact: bool
    ) -> None:
        """Whatever the budget and the order: one pack, several, one row per pack; and one row
        alone, so that a rank has nothing.
        """
        local = one()
        backend = make()
        assert isinstance(backend, Backend) and backend.steps == 0
        start = frozen(local.state())
        assert identical(backend.state(), start)
        rows = make_samples(LENGTHS)
        # masked: counts nowhere
        rows[4] = rows[4].with_(trained=torch.zeros_like(rows[4].trained))
        cuts = ((rows, 10_000), (rows[::-1], 16), (rows, 1), (rows[5:6], 10_000))
        for samples, budget in cuts:
            local.load(start)
            metrics = update(local, samples, policy_loss(), 10_000)
            want = gradient(local)
            assert float(torch.cat([g.flatten() for g in want.values()]).norm()) > 1e-3
            backend.load(start)
            again = update(backend, samples, policy_loss(), budget)
            assert again == pytest.approx(
                metrics, rel=1e-4 if exact else 0.1, abs=1e-6 if exact else 0.05
            )
            assert abs(again["train/loss"] - metrics["train/loss"]) < (1e-6 if exact else 1e-2)
            assert relative(gradient(backend), want) < (1e-6 if exact else 3e-2), budget

    def test_every_reduction_is_that_of_the_whole_batch(self, make: Make, one: Make) -> None:
        local = one()
        backend = make()
        start = frozen(local.state())
        rows = make_samples(LENGTHS)
        for reduce in REDUCERS:
            local.load(start)
            metrics = update(local, rows, policy_loss(reduce=reduce), 10_000)
            backend.load(start)
            again = update(backend, rows[::-1], policy_loss(reduce=reduce), 24)
            assert again == pytest.approx(metrics, rel=1e-4, abs=1e-6)
            assert relative(gradient(backend), gradient(local)) < 1e-6, reduce

    def test_passes_before_a_step_add_up(self, make: Make, one: Make) -> None:
        """As a critic's loss beside the policy's would make. And dividing by what is in a pass
        instead of the whole would be seen: it is wrong by far more than any tolerance here.
        """
        local = one(False)
        backend = make(False)
        start = frozen(local.state())
        rows = make_samples(LENGTHS)
        update(local, rows, NLLLoss(), 10_000)
        batches = pack(rows, 24)
        for batch in batches:
            backend.forward_backward([batch], NLLLoss(), Totals.of(batches, 32))
        backend.step()
        assert relative(gradient(backend), gradient(local)) < 1e-6
        backend.load(start)
        for batch in batches:
            backend.forward_backward([batch], NLLLoss(), Totals.of([batch], 32))
        backend.step()
        wrong = {name: g / len(batches) for name, g in gradient(backend).items()}
        assert relative(wrong, gradient(local)) > 0.05

    def test_untrained_tokens_have_no_gradient(self, make: Make) -> None:
        """A tool answer inside an episode is context only: what comes before it and what comes
        after it are all that is trained.
        """
        backend = make(False)
        start = frozen(backend.state())
        (sample,) = make_samples((20,))
        before = torch.arange(20) < 8
        after = torch.arange(20) >= 14
        found = []
        for trained in (before | after, before, after):
            backend.load(start)
            batch = Batch.pack([sample.with_(trained=sample.trained & trained)])
            backend.forward_backward([batch], NLLLoss(), Totals(12, 1, 32, {}))
            backend.step()
            found.append(gradient(backend))
        whole, first, second = found
        assert relative({name: first[name] + second[name] for name in first}, whole) < 1e-5

    @of("full", "bfloat16")
    def test_nothing_to_train_changes_nothing(self, make: Make) -> None:
        backend = make(False, learning_rate=0.1, optimizer={"weight_decay": 0.1})
        rows = make_samples(LENGTHS)
        update(backend, rows)
        before = frozen(backend.state())
        masked = [s.with_(trained=torch.zeros_like(s.trained)) for s in rows]
        packs = pack(masked, 40)
        assert backend.forward_backward(packs, NLLLoss(), Totals.of(packs)) == {}
        equal = [s.with_(streams={"advantages": torch.zeros(len(s.tokens))}) for s in rows]
        clipped = PolicyLoss(ppo_clip, REDUCERS["token_mean"])
        for samples, loss in ((equal, clipped), (masked, clipped), ([], clipped), (rows, Zero())):
            found = update(backend, samples, loss)
            assert (found["train/empty"], found["train/skipped"]) == (1, 0)
            assert found["train/grad_norm"] == 0
        assert identical(backend.state(), after_steps(before, 4))

    @of("full", "bfloat16")
    def test_a_bad_gradient_changes_nothing(self, make: Make) -> None:
        backend = make(False, max_grad_norm=1.0)
        rows = make_samples(LENGTHS)
        update(backend, rows)
        before = frozen(backend.state())
        for bad in (float("nan"), float("inf"), float("-inf")):
            found = update(backend, rows, Bad(bad))
            assert found["train/skipped"] == 1 and found["train/empty"] == 0
        assert identical(backend.state(), after_steps(before, 3))
        healthy = update(backend, rows)  # and the bad gradient is gone
        assert healthy["train/skipped"] == 0
        assert torch.isfinite(torch.tensor(healthy["train/grad_norm"]))

    # ---- steps ----

    @of("full", "lora", "bfloat16")
    def test_steps_and_state_are_those_of_one_process(
        self, make: Make, one: Make, model: str, exact: bool
    ) -> None:
        """Rate, clipping, norm, decay: after three steps the two checkpoints hold the same names,
        types and values, and all that is trained.
        """
        settings: dict[str, Any] = {
            "learning_rate": 1e-4,
            "schedule": {"kind": "cosine", "warmup": 2},
            "optimizer": {"weight_decay": 0.1},
            "max_grad_norm": 0.02,
        }
        local = one(**settings)
        backend = make(**settings)
        for seed in range(3):
            rows = make_samples(LENGTHS, seed)
            want = update(local, rows, policy_loss())
            found = update(backend, rows, policy_loss())
            assert want["train/grad_norm"] > 0.02  # it is clipped
            assert found == pytest.approx(
                want, rel=1e-4 if exact else 0.2, abs=1e-6 if exact else 0.05
            )
        a = local.state()
        b = backend.state()
        assert a.meta == b.meta == json.loads(json.dumps(b.meta)) and backend.steps == 3
        assert {k: (t.dtype, t.shape) for k, t in a.tensors.items()} == {
            k: (t.dtype, t.shape) for k, t in b.tensors.items()
        }
        assert not any(t.requires_grad for t in b.tensors.values())
        assert relative(gradient(backend), gradient(local)) < (1e-5 if exact else 0.1)
        weights = [k for k in a.tensors if k.startswith("model/")]
        module = MODELS[model]().module
        trained = {name for name, p in module.named_parameters() if p.requires_grad}
        assert {k.removeprefix("model/") for k in weights} == trained
        for name in trained:
            assert {f"optimizer/{name}/exp_avg", f"optimizer/{name}/exp_avg_sq"} <= b.tensors.keys()
        assert relative({k: b.tensors[k] for k in weights}, {k: a.tensors[k] for k in weights}) < (
            1e-6 if exact else 1e-2
        )

    def test_the_rate_follows_optimizer_steps(self, make: Make) -> None:
        """Empty ones included, and not micro-batches."""
        backend = make(False, learning_rate=1e-4, schedule={"kind": "linear", "warmup": 2})
        rates = []
        for seed in range(4):
            batches = pack(make_samples(LENGTHS, seed), 16)
            assert len(batches) > 3
            backend.forward_backward(batches, NLLLoss(), Totals.of(batches))
            rates.append(backend.step().learning_rate)
        rates.append(backend.step().learning_rate)  # empty
        assert rates == pytest.approx([0.5e-4, 1e-4, 1e-4, 0.875e-4, 0.75e-4])

    @of("full", "bfloat16")
    def test_small_learning_rates_move_the_weights(self, make: Make, exact: bool) -> None:
        """In bfloat16 each step alone would round away; together they must be seen."""
        backend = make(False, learning_rate=1e-6)
        before = frozen(backend.state()).tensors
        for _ in range(3):
            update(backend, make_samples((20,)))
        after = backend.state().tensors
        names = [k.removeprefix("model/") for k in after if k.startswith("model/")]
        changes = []
        changed = 0
        for name in names:
            weight = f"model/{name}"
            master = weight if exact else f"optimizer/{name}/master"
            changes.append((after[master] - before[master]).flatten())
            changed += int((after[weight] != before[weight]).sum())
            assert torch.equal(after[weight], after[master].to(after[weight].dtype))
        far = torch.cat(changes)
        assert 5e-7 < float(far.abs().median()) < 4e-6
        assert exact or changed < 0.2 * len(far)  # the copy in bfloat16 hardly shows it

    @of("full", "lora", "bfloat16")
    def test_state_continues_bit_for_bit(self, make: Make, one: Make, exact: bool) -> None:
        """Four steps against two, a new backend, and two more: identical. By way of one process:
        equal but for rounding.
        """
        settings = {
            "learning_rate": 1e-3,
            "schedule": {"kind": "cosine", "warmup": 2},
            "optimizer": {"weight_decay": 0.01},
        }
        rows = [make_samples(LENGTHS, seed) for seed in range(4)]
        unused = pack(rows[3], 40)
        local = one(False, **settings)
        start = frozen(local.state())
        whole = make(False, **settings)
        losses = [update(whole, r)["sft/loss"] for r in rows]
        end = frozen(whole.state())
        # a gradient that was never used, and moments: a state from before the first step ends them
        whole.forward_backward(unused, NLLLoss(), Totals.of(unused, 32))
        whole.load(start)
        assert identical(whole.state(), start)
        assert [update(whole, r)["sft/loss"] for r in rows[:2]] == losses[:2]
        middle = frozen(whole.state())
        second = make(False, **settings)
        update(second, rows[3])
        second.forward_backward(unused, NLLLoss(), Totals.of(unused, 32))
        second.load(middle)
        assert identical(second.state(), middle)
        assert [update(second, r)["sft/loss"] for r in rows[2:]] == losses[2:]
        assert identical(second.state(), end)
        local.load(middle)
        update(local, rows[2])
        second.load(frozen(local.state()))
        assert update(second, rows[3])["sft/loss"] == pytest.approx(
            losses[3], rel=1e-5 if exact else 1e-2
        )
        with pytest.raises(InputError, match="another model"):
            second.load(State({"model/x": torch.zeros(2)}, middle.meta))

    # ---- what is read of it ----

    @of("full", "lora", "bfloat16", "loaded")
    def test_old_and_reference_at_the_temperature(
        self, make: Make, one: Make, model: str, exact: bool
    ) -> None:
        """Both are those of one process and without a gradient; steps move the one and not the
        other. The reference of an adapter that was loaded is the adapter as it was loaded.
        """
        near = 1e-4 if exact else 0.2
        local = one()
        backend = make(learning_rate=1e-2)
        want = pack(make_samples(LENGTHS), 64)
        local.annotate(want, frozenset({"old", "reference"}))
        with torch.no_grad():
            cold = MODELS[model]().logprobs(want[0], temperature=1.0)[0]  # type: ignore[attr-defined]
        assert float((want[0].streams["old"] - cold).abs().max()) > 0.05
        for trained in (False, True):
            batches = pack(make_samples(LENGTHS), 64)
            backend.annotate(batches, frozenset({"old", "reference"}))
            for found, wanted in zip(batches, want, strict=True):
                old = found.streams["old"]
                assert not old.requires_grad and not found.streams["reference"].requires_grad
                assert torch.allclose(
                    found.streams["reference"], wanted.streams["reference"], atol=near
                )
                assert torch.allclose(old, wanted.streams["old"], atol=near) != trained
                if model != "lora":  # where the reference is the model without its adapter
                    assert torch.equal(wanted.streams["reference"], wanted.streams["old"])
            update(backend, make_samples(LENGTHS, 1), policy_loss())

    @of("full", "lora", "bfloat16")
    def test_an_engine_gets_the_weights_that_train(self, make: Make, exact: bool) -> None:
        backend = make(False, learning_rate=1e-2)
        batch = Batch.pack(make_samples(LENGTHS))
        for _ in range(2):
            update(backend, make_samples(LENGTHS))
            backend.annotate([batch], frozenset({"old"}))
            module = backend.weights().module
            own = dict(module.named_parameters())
            for key, tensor in backend.state().tensors.items():
                if key.startswith("model/"):
                    assert torch.equal(own[key.removeprefix("model/")], tensor)
            with torch.no_grad():
                served = CausalModel(module).logprobs(batch, temperature=0.8)[0]
            gap = float((served - batch.streams["old"]).abs().max())
            assert gap < (2e-5 if exact else 0.2)

    def test_evaluation_tells_and_trains_nothing(self, make: Make, one: Make) -> None:
        backend = make(False)
        batches = pack(make_samples(LENGTHS), 40)
        totals = Totals.of(batches, 32)
        want = one(False).evaluate(batches, NLLLoss(), totals)
        before = frozen(backend.state())
        assert backend.evaluate(batches, NLLLoss(), totals) == pytest.approx(want, rel=1e-5)
        assert identical(backend.state(), before) and want["sft/loss"] > 0
        assert backend.step().empty

    # ---- other models, and what follows the weights ----

    @of("critic")
    def test_a_critic(self, make: Make, one: Make) -> None:
        local = one(False, learning_rate=1e-2)
        backend = make(False, learning_rate=1e-2)
        samples = make_samples(LENGTHS)
        for _ in range(3):
            want, values = values_pass(local, samples)
            found, again = values_pass(backend, samples)
            assert found == pytest.approx(want, rel=1e-3, abs=1e-6)
            assert torch.allclose(again, values, atol=1e-4)
        assert float(values.abs().max()) > 1e-3  # it has learned to say something
        backend.load(frozen(local.state()))
        assert identical(backend.state(), local.state())

    @of("attributes")
    def test_an_attribute_model(self, make: Make, one: Make) -> None:
        """Several heads, and answers that were not given all attributes."""
        local = one(False, learning_rate=1e-2)
        backend = make(False, learning_rate=1e-2)
        for _ in range(3):
            want, said = attributes_pass(local)
            found, again = attributes_pass(backend)
            assert {"reward/loss/helpfulness", "reward/mean/verbosity"} <= want.keys()
            assert found == pytest.approx(want, rel=1e-3, abs=1e-6)
            assert said.shape[1] == 2 and torch.allclose(again, said, atol=1e-4)
        assert float((said[:, 0] - said[:, 1]).abs().max()) > 1e-3  # the heads differ
        backend.load(frozen(local.state()))
        assert identical(backend.state(), local.state())

    @of("experts")
    def test_the_load_of_a_router_is_balanced(self, make: Make, one: Make) -> None:
        """The same micro-batches: the same load-balancing loss, and the same gradient."""
        local = one()
        backend = make()
        rows = make_samples(LENGTHS)
        want = update(local, rows, policy_loss(), 1)
        assert want["train/router_aux_loss"] > 0.1
        assert update(backend, rows, policy_loss(), 1) == pytest.approx(want, rel=1e-4, abs=1e-6)
        assert relative(gradient(backend), gradient(local)) < 1e-5

    @of("experts")
    def test_tokens_go_where_they_went_when_they_were_sampled(self, make: Make, one: Make) -> None:
        model = MODELS["experts"]()
        assert isinstance(model, CausalModel)
        rows = with_routes(make_samples(LENGTHS), model)
        local = one(router_replay="on")
        backend = make(router_replay="on")
        want = update(local, rows, policy_loss(), 1)
        assert update(backend, rows, policy_loss(), 1) == pytest.approx(want, rel=1e-4, abs=1e-6)
        assert relative(gradient(backend), gradient(local)) < 1e-5
        free = one()
        update(free, rows, policy_loss(), 1)
        assert relative(gradient(free), gradient(local)) > 1e-2

    @of("deepseek_v3", "ernie4_5_moe")
    def test_biases_of_routers_follow_the_load(self, make: Make, one: Make) -> None:
        """By the tokens of all ranks, each counted once; an engine and a checkpoint get them."""
        asked = {"router_bias_rate": 0.004, "learning_rate": 1e-3}
        local = one(False, **asked)
        backend = make(False, **asked)
        for seed in range(7):
            rows = make_samples((20, 19, 21), seed)  # three packs: one rank computes one in vain
            for each in (local, backend):
                update(each, rows, budget=1)
        want = dict(within(frozen(local.state()).tensors, BIASES))
        found = dict(within(backend.state().tensors, BIASES))
        assert found.keys() == want.keys() and len(want) > 0
        for name, bias in want.items():
            assert torch.equal(found[name], bias) and 0.003 < bias.abs().max() < 0.03
        module = backend.weights().module
        if module is not None:  # an actor keeps it
            for name, bias in biases_of(module):
                assert torch.equal(bias, want[name])
        for rate in (0.004, 0.0):  # a branch of a run may leave them where they are
            resumed = make(False, **{**asked, "router_bias_rate": rate})
            resumed.load(frozen(backend.state()))
            assert identical(resumed.state(), backend.state())

    def test_what_follows_the_weights(self, make: Make, one: Make) -> None:
        """A moving reference and an average: as in one process, in the checkpoint, and swapped in
        and out bit for bit.
        """
        kind = ReferenceConfig(kind="ema", decay=0.5, every=2)
        local = one(reference=kind, ema=0.9, learning_rate=1e-2)
        backend = make(reference=kind, ema=0.9, learning_rate=1e-2)
        assert local.parts().keys() == backend.parts().keys() == {"reference", "ema"}
        for seed in range(3):
            for each in (local, backend):
                update(each, make_samples(LENGTHS, seed), policy_loss())
        for name, part in backend.parts().items():
            theirs = local.parts()[name].state()
            mine = frozen(part.state())
            assert mine.meta == theirs.meta and relative(mine.tensors, theirs.tensors) < 1e-4
            part.load(mine)
            assert identical(part.state(), mine)
        before = frozen(backend.state())
        found = []
        for each in (local, backend):
            batches = pack(make_samples(LENGTHS), 64)
            each.annotate(batches, frozenset({"reference"}))
            with each.ema.swapped():
                each.annotate(batches, frozenset({"old"}))
            found.append(batches)
        for a, b in zip(*found, strict=True):
            for stream in ("old", "reference"):
                assert torch.allclose(a.streams[stream], b.streams[stream], atol=1e-3)
        assert identical(backend.state(), before)


class OnTwoRanks(BackendContract):
    """The same points, with one pair of ranks for all of them."""

    @pytest.fixture(scope="class")
    def started(self) -> Iterator[Ranks]:
        with Ranks.open(2, "cpu") as opened:
            yield opened
