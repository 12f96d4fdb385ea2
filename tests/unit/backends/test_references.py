"""What follows the weights: moving references and the average for evaluation.

By hand on one weight, and exact on resume.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.split_backends import load
from helpers.tiny_runs import DATA, EVAL, LORA, digest, launch, lines, odd, tensors
from helpers.toys import SilentView, make_module, make_samples, parameters, train_config
from reinforge.algorithms.losses.supervised import NLLLoss
from reinforge.backends.ema import WeightAverage
from reinforge.backends.local import LocalBackend
from reinforge.backends.optimizer import MasterOptimizer
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.saved_model import load_weights
from reinforge.build.trainer import build
from reinforge.checkpoint import store
from reinforge.config.adapter import AdapterConfig
from reinforge.config.algorithm import ReferenceConfig
from reinforge.config.optimizer import OptimizerConfig
from reinforge.config.schema import Config
from reinforge.core.batch import Totals, pack
from reinforge.models.adapters import adapter_off, add_adapter
from reinforge.models.causal import CausalModel
from reinforge.models.load import load_model
from reinforge.offline.export import export


def one_weight(dtype: torch.dtype = torch.float32) -> tuple[nn.Linear, MasterOptimizer]:
    module = nn.Linear(1, 1, bias=False).to(dtype)
    with torch.no_grad():
        module.weight.fill_(1.0)
    return module, MasterOptimizer(module, OptimizerConfig())


# the average


def test_average_by_hand() -> None:
    module, optimizer = one_weight()
    average = WeightAverage(optimizer, 0.75)
    for weight, expected in ((2.0, 1.25), (4.0, 1.9375)):
        optimizer.masters["weight"].data.fill_(weight)
        average.after_step()
        assert average.values["weight"].item() == expected
    with average.swapped():
        assert module.weight.item() == 1.9375
    assert module.weight.item() == 4.0 and average.values["weight"].item() == 1.9375


def test_low_precision_averages_the_masters() -> None:
    """A change of 1e-4 is nothing to a bfloat16 weight of 1; the average follows the master, and
    both come back to the bit.
    """
    module, optimizer = one_weight(torch.bfloat16)
    average = WeightAverage(optimizer, 0.5)
    optimizer.masters["weight"].fill_(1.0001)
    average.after_step()
    assert average.values["weight"].dtype == torch.float32 and average.values[
        "weight"
    ].item() == pytest.approx(1.00005, abs=1e-7)
    optimizer.masters["weight"].fill_(3.0)
    module.weight.data.fill_(3.0)
    average.after_step()
    with average.swapped():
        assert (
            module.weight.item() == pytest.approx(2.0, abs=1e-2)
            and module.weight.dtype == torch.bfloat16
        )
    assert module.weight.item() == 3.0 and average.values["weight"].item() == pytest.approx(
        2.000025, abs=1e-6
    )


def test_the_weights_come_back_after_an_error() -> None:
    module, optimizer = one_weight()
    average = WeightAverage(optimizer, 0.5)
    place = module.weight.data_ptr()
    optimizer.masters["weight"].data.fill_(5.0)
    with pytest.raises(RuntimeError), average.swapped():
        assert module.weight.item() == 1.0 and module.weight.data_ptr() == place
        raise RuntimeError
    assert module.weight.item() == 5.0 and average.values["weight"].item() == 1.0


# references


def make_backend(adapted: bool, **reference: Any) -> LocalBackend:
    module = make_module("qwen3" if adapted else "llama")
    if adapted:
        module = add_adapter(module, AdapterConfig(rank=4), seed=0)
    return LocalBackend(
        CausalModel(module),
        train_config(learning_rate=1e-2),
        total_steps=10,
        reference=ReferenceConfig(**reference),
    )


def streams(backend: LocalBackend) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the policy and of its reference."""
    batches = pack(make_samples(), 64)
    backend.annotate(batches, frozenset({"old", "reference"}))
    return torch.cat([b.streams["old"] for b in batches]), torch.cat(
        [b.streams["reference"] for b in batches]
    )


def train(backend: LocalBackend, steps: int = 1) -> None:
    batches = pack(make_samples(), 64)
    for _ in range(steps):
        backend.forward_backward(batches, NLLLoss(), Totals.of(batches))
        assert not backend.step().empty


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
def test_a_synced_reference_is_the_policy_of_every_other_step(adapted: bool) -> None:
    backend = make_backend(adapted, kind="sync", every=2)
    start, reference = streams(backend)
    assert torch.equal(start, reference)
    train(backend)
    first, reference = streams(backend)
    assert torch.equal(reference, start) and not torch.allclose(first, start, atol=1e-3)
    train(backend)
    second, reference = streams(backend)
    assert torch.equal(reference, second)  # annotating left the policy alone, and the copy is exact
    train(backend)
    third, reference = streams(backend)
    assert torch.equal(reference, second) and not torch.allclose(third, second, atol=1e-3)


def test_a_reference_made_after_an_engine_moves_as_well() -> None:
    """An engine joins q, k and v into one product; a copy of such a model got the new weights and
    went on computing with the old.
    """
    from reinforge.engines.native import NativeEngine

    model = CausalModel(make_module("llama"))
    NativeEngine(model, kv_gib=0.001)
    settings = dict(total_steps=10, reference=ReferenceConfig(kind="sync", every=1))
    backend = LocalBackend(model, train_config(learning_rate=1e-2), **settings)
    start, _ = streams(backend)
    train(backend)
    now, reference = streams(backend)
    assert not torch.allclose(now, start, atol=1e-3)
    torch.testing.assert_close(reference, now, atol=1e-5, rtol=0)


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
def test_an_averaged_reference_has_the_averaged_weights(adapted: bool) -> None:
    backend = make_backend(adapted, kind="ema", decay=0.6)
    w0 = parameters(backend.model.module)
    train(backend)
    w1 = parameters(backend.model.module)
    train(backend)
    w2 = parameters(backend.model.module)
    assert backend.reference is not None and backend.reference.average is not None
    for name, value in backend.reference.average.values.items():
        torch.testing.assert_close(
            value, 0.36 * w0[name] + 0.24 * w1[name] + 0.4 * w2[name], atol=1e-6, rtol=1e-6
        )
    policy, reference = streams(backend)
    assert all(torch.equal(w2[name], p) for name, p in parameters(backend.model.module).items())
    with torch.no_grad():
        for name, p in backend.model.module.named_parameters():
            if name in backend.reference.average.values:
                p.copy_(backend.reference.average.values[name])
    by_hand, _ = streams(backend)
    assert torch.equal(by_hand, reference) and not torch.allclose(policy, reference, atol=1e-3)


def test_a_loaded_adapter_is_its_own_reference() -> None:
    """The reference is the policy that the run starts from, adapter included: not the bare base.

    It stays so while the adapter is trained, and a resumed run makes the same one from the files
    again: it is no part of a checkpoint.
    """

    def begin() -> LocalBackend:
        return LocalBackend(
            load("loaded"), train_config(learning_rate=1e-2), total_steps=10, reference=True
        )  # type: ignore[arg-type]

    backend = begin()
    start, reference = streams(backend)
    with adapter_off(backend.model.module):
        base, _ = streams(backend)
    assert torch.equal(start, reference) and float((start - base).abs().max()) > 0.1
    train(backend, 3)
    policy, reference = streams(backend)
    assert torch.equal(reference, start) and not torch.allclose(policy, start, atol=1e-2)
    assert backend.parts() == {} and backend.frozen is None  # nothing of the base was copied
    again = begin()
    again.load(backend.state())
    found = streams(again)
    assert torch.equal(found[0], policy) and torch.equal(found[1], start)


def test_only_what_moves_is_a_part() -> None:
    assert make_backend(False).parts() == {} and make_backend(True).parts() == {}
    moving = make_backend(False, kind="ema").parts()["reference"].state()
    assert moving.meta == {"steps": 0} and set(moving.tensors) == {
        name for name, _ in make_module("llama").named_parameters()
    }
    assert make_backend(False).reference.state().tensors == {}  # type: ignore[union-attr]


def test_entropy_can_be_annotated() -> None:
    backend = make_backend(True)
    batches = pack(make_samples(), 64)
    backend.annotate(batches, frozenset({"entropy"}))
    assert set(batches[0].streams) == {"behaviour", "advantages", "entropy"}
    _, entropy = backend.model.logprobs(batches[0], temperature=1.0, entropy=True)
    assert entropy is not None and torch.equal(batches[0].streams["entropy"], entropy)


# runs


class Crash(Exception):
    pass


def die_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    original = LocalBackend.step

    def dies(self: LocalBackend) -> Any:
        if self.steps == step:
            raise Crash
        return original(self)

    monkeypatch.setattr(LocalBackend, "step", dies)


KL = ("algorithm.kl.coefficient=0.1", "algorithm.kl.estimator=k2", "train.learning_rate=0.01")
CASES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "sync": (
        "grpo",
        (*KL, "algorithm.kl.reference.kind=sync", "algorithm.kl.reference.every=3"),
        {},
    ),
    "ema": (
        "grpo",
        (*KL, "algorithm.kl.reference.kind=ema", "algorithm.kl.reference.decay=0.8"),
        {},
    ),
    "ema-lora": ("grpo", (*KL, "algorithm.kl.reference.kind=ema"), LORA),
    "ema-bfloat16": (
        "grpo",
        (*KL, "algorithm.kl.reference.kind=ema", "model.dtype=bfloat16", "train.ema=0.9"),
        {},
    ),
    "adaptive": (
        "grpo",
        (
            *KL,
            "algorithm.kl.target=0.001",
            "algorithm.kl.horizon=40",
            "algorithm.entropy_target=6.0",
            "algorithm.entropy_rate=0.01",
        ),
        {},
    ),
    "adaptive-reward": (
        "reinforce_pp",
        ("algorithm.kl.target=0.001", "algorithm.kl.horizon=40", "train.learning_rate=0.01"),
        {},
    ),
    "policy-ema": ("grpo", ("train.ema=0.9", "eval.every=1", "eval.temperature=1.0"), {}),
    "policy-ema-sft": ("sft", ("train.ema=0.9",), {}),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.long)
        if case in ("ema-lora", "adaptive-reward", "policy-ema")
        else case
        for case in CASES
    ],
)
def test_resume_is_exact(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """A run that dies in step 4 of 5 with its last checkpoint at 2 ends with the digest and the
    metrics of one that never died.
    """
    algorithm, overrides, sections = CASES[case]
    settings = ("train.steps=5", "run.checkpoint.every=2", *overrides)
    eval_data = EVAL if "eval.every=1" in overrides else None
    whole, cut = (make(name, algorithm, *settings, **sections) for name in ("whole", "cut"))
    launch(whole, eval_data=eval_data)
    with monkeypatch.context() as patch:
        die_at(patch, 3)
        with pytest.raises(Crash):
            launch(cut, eval_data=eval_data)
    assert store.step_of(store.steps(Path(cut.run.dir))[0]) == 2
    launch(cut, eval_data=eval_data)
    assert digest(cut) == digest(whole)

    def drop(m: dict[str, Any]) -> dict[str, Any]:
        clock = ("time", "share", "tokens_per_second", "memory", "efficiency")
        return {k: v for k, v in m.items() if not k.startswith(clock)}

    for again, once in zip(lines(cut), lines(whole), strict=True):
        assert {
            k: (v, again.get(k)) for k, v in drop(once).items() if v != again.get(k)
        } == {} and drop(again).keys() == drop(once).keys()


def test_coefficients_move_in_a_run(make: Callable[..., Config]) -> None:
    algorithm, overrides, _ = CASES["adaptive"]
    cfg = make("run", algorithm, "train.steps=4", *overrides)
    launch(cfg)
    steps = lines(cfg)
    kl = [m["policy/kl_coefficient"] for m in steps]
    entropy = [m["policy/entropy_coefficient"] for m in steps]
    expected = [0.1]
    for m in steps[:-1]:
        error = min(max(m["policy/kl"] / 0.001 - 1, -0.2), 0.2)
        expected.append(expected[-1] * (1 + error * m["batch/samples"] / 40))
    assert (
        kl == pytest.approx(expected, rel=1e-9) and kl[1] < kl[0] < kl[-1] * 2 and len(set(kl)) == 4
    )
    assert entropy == pytest.approx([0.0, 0.01, 0.02, 0.03])


def test_a_moving_reference_keeps_the_kl_small(make: Callable[..., Config]) -> None:
    """Synced after every step it is the policy itself: the KL of every step is 0.

    Frozen, it grows.
    """
    kls = {}
    for kind in ("frozen", "sync"):
        cfg = make(kind, "grpo", *KL, f"algorithm.kl.reference.kind={kind}", "train.steps=3")
        launch(cfg)
        kls[kind] = [m["policy/kl"] for m in lines(cfg)]
    assert kls["sync"] == pytest.approx([0, 0, 0], abs=1e-9) and kls["frozen"][2] > 1e-5


def test_the_kl_to_a_loaded_adapter_starts_at_zero(
    make: Callable[..., Config], tmp_path: Path
) -> None:
    """At learning rate 0 the policy is its reference at every step, whatever the adapter has
    learned before.
    """
    before = make("before", "sft", "train.learning_rate=0.05", "train.steps=6", **LORA)
    launch(before)
    export(Path(before.run.dir), tmp_path / "adapter", merge=False)
    cfg = make(
        "after",
        "grpo",
        *KL,
        "train.learning_rate=0",
        "train.steps=2",
        adapter={"path": str(tmp_path / "adapter")},
    )
    launch(cfg)
    steps = lines(cfg)
    assert [m["policy/kl"] for m in steps] == pytest.approx([0, 0], abs=1e-9)
    learned = load_model(cfg.model, cfg.adapter).module.named_parameters()
    assert any(float(p.detach().abs().max()) > 1e-2 for name, p in learned if "lora_B" in name)


def test_evaluation_and_export_use_the_average(make: Callable[..., Config], tmp_path: Path) -> None:
    """The final evaluation of a run with an average is that of the average's weights, and so is the
    exported model; training goes on with the plain ones: their digest is that of a run without an
    average.
    """
    settings = (
        "train.steps=4",
        "train.learning_rate=0.02",
        "eval.every=2",
        "eval.temperature=1.0",
        "eval.samples=4",
        "eval.at_start=false",
    )
    with_average = make("with", "grpo", "train.ema=0.5", *settings)
    without = make("without", "grpo", *settings)
    results = [launch(cfg, eval_data=EVAL) for cfg in (with_average, without)]
    saved = tensors(with_average)
    plain = tensors(without)
    assert all(torch.equal(saved[name], plain[name]) for name in plain)
    averages = {
        name.removeprefix("part/ema/"): t
        for name, t in saved.items()
        if name.startswith("part/ema/")
    }
    assert averages and any(
        not torch.equal(averages[name], saved[f"model/{name}"]) for name in averages
    )

    model = load_model(with_average.model)
    load_weights(model, Path(with_average.run.dir))
    assert all(torch.equal(p, averages[name]) for name, p in model.module.named_parameters())
    trainer = build(
        without.model_copy(
            update={"run": without.run.model_copy(update={"dir": str(tmp_path / "other")})}
        ),
        SilentView(),
        CallerObjects(data=DATA, eval_data=EVAL, rewards=[odd], model=model),
    )
    from reinforge.core.aio import run_sync

    assert trainer.run.evaluator.evaluate is not None
    again = run_sync(trainer.run.evaluator.evaluate())  # type: ignore[arg-type]
    found = [{k: v for k, v in r.metrics.items() if k.startswith("eval/")} for r in results]
    assert {k: again[k] for k in found[0]} == found[0] != found[1]

    exported = load_model(
        with_average.model.model_copy(
            update={"path": str(export(Path(with_average.run.dir), tmp_path / "out"))}
        )
    )
    assert all(torch.equal(p, averages[name]) for name, p in exported.module.named_parameters())
