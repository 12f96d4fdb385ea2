"""`rollout.overlap`: an engine with a copy of what is trained generates while a step trains, and
the run is the one that it would be without.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.tiny_runs import DATA, EVAL, LORA, digest, launch, lines
from helpers.toy_architectures import make_architecture
from helpers.toys import SilentView
from reinforge.backends.deterministic import Determinism
from reinforge.backends.local import LocalBackend
from reinforge.backends.teachers import LocalTeacher
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.run import train_config
from reinforge.checkpoint import store
from reinforge.config.schema import Config
from reinforge.core.errors import InputError, Terminated
from reinforge.core.turns import TURNS, Turns
from reinforge.engines.beside import EngineBeside, WeightCopy
from reinforge.engines.native.decoder import undisturbed
from reinforge.engines.native.engine import NativeEngine
from reinforge.loops import rl
from reinforge.models.causal import CausalModel
from reinforge.models.fused_linear import fused_part, join
from reinforge.models.load import load_model
from reinforge.models.router_bias import biases_of
from reinforge.offline.evaluate import evaluate_saved
from reinforge.rollout.buffer import RolloutBuffer

STALE = ("train.steps=5", "rollout.staleness=1")
OF_THE_CLOCK = ("time", "share", "memory", "tokens_per_second", "efficiency")


def logged(cfg: Config) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in line.items() if not name.startswith(OF_THE_CLOCK)}
        for line in lines(cfg)
    ]


def both(make: Callable[..., Config], *overrides: str, **sections: Any) -> tuple[Config, Config]:
    """The run with the key and the run without it, both done."""
    found = []
    for overlap in ("true", "false"):
        settings = (*STALE, *overrides, f"rollout.overlap={overlap}")
        algorithm = "ppo" if "critic" in sections else "grpo"
        cfg = make(f"overlap-{overlap}", algorithm, *settings, **sections)
        launch(cfg, eval_data=EVAL)
        found.append(cfg)
    return found[0], found[1]


def slow(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    work = getattr(owner, name)

    def slowly(*given: Any) -> Any:
        time.sleep(0.02)
        return work(*given)

    monkeypatch.setattr(owner, name, slowly)


@pytest.mark.parametrize(
    ("overrides", "sections", "slowed"),
    [
        (("eval.every=2", "run.checkpoint.every=2"), {}, (LocalBackend, "forward_backward")),
        (
            ("rollout.staleness=2", "algorithm.epochs=2", "train.ema=0.5", "eval.every=3"),
            {},
            (NativeEngine, "_round"),
        ),
        (("sampling.prefer=teachable", "train.steps=8"), {}, (NativeEngine, "_round")),
        (("train.learning_rate=0.01",), LORA, None),
        (("model.exact=true", "train.steps=3", "rollout.max_new_tokens=4"), {}, None),
        ((), {"critic": {}}, None),
    ],
    ids=[
        "all weights",
        "two steps ahead, with an average",
        "teachable",
        "an adapter",
        "exact",
        "a critic",
    ],
)
def test_the_run_is_the_one_without_it(
    make: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
    overrides: tuple[str, ...],
    sections: dict[str, Any],
    slowed: tuple[type, str] | None,
) -> None:
    """Whichever of training and generating takes longer."""
    if slowed is not None:
        slow(monkeypatch, *slowed)
    beside, before = both(make, *overrides, **sections)
    assert digest(beside) == digest(before)
    assert logged(beside) == logged(before)
    assert any(line.get("train/grad_norm", 0) > 0 for line in lines(beside))


def test_a_teacher_of_another_precision(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading it sets torch's precision for all threads: so it is loaded before one generates."""
    threads = []
    load = LocalTeacher.load

    def told(self: LocalTeacher) -> None:
        threads.append(threading.current_thread())
        load(self)

    monkeypatch.setattr(LocalTeacher, "load", told)
    runs = []
    for overlap in ("true", "false"):
        teacher = {"path": make().model.path, "dtype": "bfloat16"}
        settings = ("train.steps=3", "rollout.staleness=1", f"rollout.overlap={overlap}")
        cfg = make(f"overlap-{overlap}", "opd", *settings, teacher=teacher, rewards=[])
        train_config(cfg, CallerObjects(data=DATA), SilentView())
        runs.append(cfg)
    assert threads == [threading.main_thread()]
    assert digest(runs[0]) == digest(runs[1])


def test_an_evaluation_does_not_wait_for_rewards(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token is there, so other weights disturb nobody."""
    waited: list[int] = []
    settle = RolloutBuffer.settle

    async def told(self: RolloutBuffer) -> None:
        waited.append(len(self.in_flight))
        await settle(self)

    monkeypatch.setattr(RolloutBuffer, "settle", told)
    both(make, "train.ema=0.5", "eval.every=1")
    assert waited == [0, 0]  # at the end, of each


def test_tokens_come_while_a_step_trains(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second step on what comes next is held up until a step trains, and the step until
    tokens come: neither would go on if they took turns.
    """
    until = time.monotonic() + 60  # so that taking turns fails the test, and does not hang it
    training = threading.Event()
    rounds = threading.Event()
    came = []
    threads = set()
    one_round, train = NativeEngine._round, LocalBackend.forward_backward

    def held(self: NativeEngine) -> None:
        if self.version and not training.is_set() and time.monotonic() < until:
            time.sleep(0.001)
            return
        one_round(self)
        rounds.set()

    def waits(self: LocalBackend, *given: Any) -> Any:
        rounds.clear()
        training.set()
        came.append(rounds.wait(20 if 0 < len(came) < 4 else 0))
        threads.add(threading.current_thread())
        return train(self, *given)

    monkeypatch.setattr(NativeEngine, "_round", held)
    monkeypatch.setattr(LocalBackend, "forward_backward", waits)
    update = EngineBeside.update

    async def holds(self: EngineBeside, *given: Any) -> None:
        training.clear()
        await update(self, *given)

    monkeypatch.setattr(EngineBeside, "update", holds)
    launch(make("run", "grpo", *STALE, "rollout.overlap=true"))
    assert came[1:] == [True, True, True, False]
    assert threading.main_thread() not in threads


@pytest.mark.parametrize(
    ("before", "after"), [("true", "true"), ("false", "true"), ("true", "false")]
)
def test_a_resumed_run_is_the_same_run(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, before: str, after: str
) -> None:
    """With an adapter; it says when tokens are computed and not which, so it may change."""
    settings = ("train.steps=6", "rollout.staleness=1", "run.checkpoint.every=2")
    whole = make("whole", "grpo", *settings, "rollout.overlap=true", **LORA)
    launch(whole)
    cut = make("cut", "grpo", *settings, f"rollout.overlap={before}", **LORA)
    step = LocalBackend.step

    def dies(self: LocalBackend) -> Any:
        if self.steps == 3:
            raise RuntimeError("killed")
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(LocalBackend, "step", dies)
        with pytest.raises(RuntimeError, match="killed"):
            launch(cut)
    extra = store.load(store.steps(Path(cut.run.dir))[0])[1]
    assert [entry["step"] for entry in extra["parts"]["ahead"]["begun"]] == [2]
    resumed = make("cut", "grpo", *settings, f"rollout.overlap={after}", **LORA)
    launch(resumed)
    assert digest(resumed) == digest(whole) and logged(resumed) == logged(whole)


def test_sizes_are_found_anew_where_it_changes(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU those of a run without it leave no room for both at once; back again they stay."""
    settings = ("rollout.staleness=1", "run.checkpoint.every=2")

    def sizes(cfg: Config) -> tuple[int, int]:
        newest = store.latest(Path(cfg.run.dir))
        assert newest is not None
        state, extra = store.load(newest)
        return state.meta["budget"], extra["counters"]["engine/blocks"]

    found = []
    for steps, overlap, budget, gib in (
        (2, "false", 4000, 0.02),
        (4, "false", 3000, 0.01),
        (6, "true", 3000, 0.01),
    ):
        monkeypatch.setattr(LocalBackend, "_budget", lambda *given, budget=budget: budget)
        rollout = {"max_new_tokens": 8, "kv_gib": gib}
        cfg = make(
            "run",
            "grpo",
            f"train.steps={steps}",
            *settings,
            f"rollout.overlap={overlap}",
            rollout=rollout,
        )
        launch(cfg)
        found.append(sizes(cfg))
    assert found[1] == found[0]
    assert found[2][0] == 3000 and 0 < found[2][1] <= found[0][1] / 2


@pytest.mark.parametrize(
    ("they_come", "every", "saved"),
    [(True, 2, 4), (False, 2, 2), (False, 0, None)],
    ids=["they come", "they do not come", "nothing was saved before"],
)
def test_asked_to_end_while_tokens_come(
    make: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
    they_come: bool,
    every: int,
    saved: int | None,
) -> None:
    """The weights have moved: the step is saved when the tokens are there, or has not been."""
    settings = ("train.steps=6", "rollout.staleness=1", "rollout.overlap=true")
    settings = (*settings, f"run.checkpoint.every={every}")
    whole = make("whole", "grpo", *settings)
    launch(whole)
    ended = make("ended", "grpo", *settings)
    one_round, step = NativeEngine._round, LocalBackend.step
    trained, asked = threading.Event(), threading.Event()

    def holds(self: NativeEngine) -> None:
        if self.version == 3 and not asked.is_set() and trained.is_set():
            asked.set()
            os.kill(os.getpid(), signal.SIGTERM)
        if self.version == 3 and not (asked.is_set() and they_come):
            time.sleep(0.001)
            return
        one_round(self)

    def tells(self: LocalBackend) -> Any:
        report = step(self)
        if self.steps == 4:
            trained.set()
        return report

    with monkeypatch.context() as patch:
        patch.setattr(NativeEngine, "_round", holds)
        patch.setattr(LocalBackend, "step", tells)
        patch.setattr(rl, "PATIENCE", 30.0 if they_come else 0.2)
        goes_on = "continues" if saved else "begins again"
        with pytest.raises(Terminated, match=f"at step [34] of 6;.* the same command {goes_on}"):
            launch(ended)
    newest = store.latest(Path(ended.run.dir))
    assert (None if newest is None else store.load(newest)[1]["step"]) == saved
    launch(make("ended", "grpo", *settings))
    assert digest(ended) == digest(whole)
    assert [line for line in logged(ended) if "train/loss" in line] == [
        line for line in logged(whole) if "train/loss" in line
    ]


def test_a_checkpoint_is_evaluated_with_its_own_weights(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing is trained then, so there is no copy."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in DATA))
    data = {"source": str(rows), "eval": {"size": 4}}
    cfg = make(
        "run", "grpo", *STALE, "train.learning_rate=0.05", "rollout.overlap=true", data=data, **LORA
    )
    train_config(cfg, CallerObjects(), SilentView())
    run = Path(cfg.run.dir)
    monkeypatch.setattr(EngineBeside, "__init__", lambda *given: pytest.fail("there is a copy"))
    beside = evaluate_saved(run, [], "latest")
    assert beside == evaluate_saved(run, ["rollout.overlap=false"], "latest")


# the copy


@pytest.mark.parametrize("adapter", [False, True])
def test_what_is_frozen_is_there_once(make: Callable[..., Config], adapter: bool) -> None:
    cfg = make("x", "grpo", **(LORA if adapter else {}))
    trained, other = (load_model(cfg.model, cfg.adapter, seed=seed) for seed in (1, 2))
    weights = WeightCopy(other, trained)
    theirs = dict(trained.module.named_parameters())
    ours = dict(other.module.named_parameters())
    assert theirs.keys() == ours.keys()
    for name, parameter in theirs.items():
        assert (ours[name] is parameter) == (not parameter.requires_grad), name
        assert ("lora" in name) == parameter.requires_grad or not adapter, name
    if adapter:
        learned = sum(p.nbytes for p in theirs.values() if p.requires_grad)
        copied = sum(own.nbytes for own, _ in weights._pairs())
        assert copied - learned < 4096  # buffers: the frequencies of positions
    parts = [part for m in other.module.modules() if (part := fused_part(m)) is not None]
    joined = [part.joint.weight for part in parts]
    assert parts and all((weight is not None) == adapter for weight in joined)
    assert join(other.module) == (0 if adapter else len({id(part.joint) for part in parts}))

    with torch.no_grad():
        for parameter in theirs.values():
            if parameter.requires_grad:
                parameter.add_(1.0)
    assert not all(torch.equal(ours[name], theirs[name]) for name in theirs)
    weights.refresh()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_copy_begins_with_the_weights_of_the_trainer(make: Callable[..., Config]) -> None:
    """Which may be those of a checkpoint by then."""
    cfg = make("x", "grpo", **LORA)
    trained, other = (load_model(cfg.model, cfg.adapter, seed=seed) for seed in (1, 2))
    with torch.no_grad():
        for parameter in trained.module.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)
    WeightCopy(other, trained)
    theirs = dict(trained.module.named_parameters())
    assert all(torch.equal(p, theirs[name]) for name, p in other.module.named_parameters())


@pytest.mark.parametrize("kind", ["deepseek_v3", "ernie4_5_moe"])
def test_biases_of_routers_are_copied(kind: str) -> None:
    """They move without a gradient; a buffer in the one, a frozen parameter in the other."""
    trained, other = (CausalModel(make_architecture(kind)) for _ in range(2))
    for module in (trained.module, other.module):
        module.requires_grad_(False)
    weights = WeightCopy(other, trained)
    theirs, ours = (dict(biases_of(model.module)) for model in (trained, other))
    assert len(theirs) > 0
    with torch.no_grad():
        for bias in theirs.values():
            bias.add_(1.0)
    assert not any(torch.equal(ours[name], bias) for name, bias in theirs.items())
    weights.refresh()
    assert all(torch.equal(ours[name], bias) for name, bias in theirs.items())
    shared = {id(p) for p in trained.module.parameters()}
    assert sum(id(p) not in shared for p in other.module.parameters()) <= len(theirs)


def test_other_weights_than_the_trainers_are_refused(make: Callable[..., Config]) -> None:
    cfg = make("x", "grpo")
    trained, other = (load_model(cfg.model, None) for _ in range(2))
    weights = WeightCopy(other, trained)
    engine = EngineBeside(NativeEngine(other, kv_gib=0.01), weights)
    backend = LocalBackend(other, cfg.train, total_steps=1)
    with pytest.raises(AssertionError):
        asyncio.run(engine.update(backend.weights(), 1))
    trained_weights = LocalBackend(trained, cfg.train, total_steps=1).weights()
    asyncio.run(engine.update(trained_weights, 3))
    assert engine.engine.version == 3


# turns on a GPU


def test_nobody_works_while_one_is_alone() -> None:
    """Whoever asks to be alone goes before the next piece of work, however soon that comes."""
    turns = Turns()
    told: list[str] = []
    over = threading.Event()
    pieces = 0

    def works() -> None:
        nonlocal pieces
        while not over.is_set():
            with turns.working(), turns.working():  # one inside the other
                told.append("begins")
                time.sleep(0.002)
                told.append("ends")
                pieces += 1

    worker = threading.Thread(target=works)
    worker.start()
    try:
        for _ in range(5):
            seen = pieces
            while pieces == seen:
                time.sleep(0.001)
            with turns.alone():
                told.append("alone")
                time.sleep(0.01)
                told.append("alone")
    finally:
        over.set()
        worker.join(10)
    assert not worker.is_alive()
    pairs = list(zip(told[::2], told[1::2], strict=True))
    assert set(pairs) == {("begins", "ends"), ("alone", "alone")}
    assert pairs.count(("alone", "alone")) == 5


def test_two_are_alone_one_after_the_other() -> None:
    turns = Turns()
    told: list[str] = []

    def asks() -> None:
        for _ in range(20):
            with turns.alone():
                told.append("begins")
                time.sleep(0.001)
                told.append("ends")

    threads = [threading.Thread(target=asks) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert told == ["begins", "ends"] * 40


def test_others_go_on_when_something_went_wrong() -> None:
    """While one was alone, and while one waited for it."""
    turns = Turns()
    with pytest.raises(RuntimeError, match="inside"), turns.alone():
        raise RuntimeError("inside")
    with turns.working():
        pass

    def interrupted(*given: Any) -> bool:
        raise KeyboardInterrupt

    wait_for = turns._changed.wait_for
    turns._changed.wait_for = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt), turns.alone():
        pass
    turns._changed.wait_for = wait_for  # type: ignore[method-assign]
    with turns.working():
        pass
    with turns.alone():
        pass


def test_who_waits_to_work_goes_before_the_next_one_that_is_alone() -> None:
    """However soon that asks again."""
    turns = Turns()
    over = threading.Event()
    pieces = 0

    def works() -> None:
        nonlocal pieces
        while not over.is_set():
            with turns.working():
                time.sleep(0.001)
            pieces += 1

    worker = threading.Thread(target=works)
    worker.start()
    for _ in range(50):
        with turns.alone():
            time.sleep(0.002)
    seen = pieces
    over.set()
    worker.join(10)
    assert seen >= 15


def test_others_may_be_alone_while_work_waits_elsewhere() -> None:
    turns = Turns()
    told: list[str] = []
    asked, rested = threading.Event(), threading.Event()

    def works() -> None:
        with turns.resting():  # not inside a piece of work: nothing to give up
            pass
        with turns.working():
            with turns.resting():
                asked.set()
                rested.wait(10)
            told.append("works")

    worker = threading.Thread(target=works)
    worker.start()
    assert asked.wait(10)
    with turns.alone():
        rested.set()
        time.sleep(0.02)
        told.append("alone")
    worker.join(10)
    assert told == ["alone", "works"]
    with turns.alone():  # it has ended
        pass


def test_a_graph_is_captured_with_the_usual_operations() -> None:
    """Training asks torch for deterministic forms, which holds for all threads: not meanwhile."""
    seen: list[bool] = []
    captures, trained = threading.Event(), threading.Event()

    def trains() -> None:
        captures.wait(10)
        with Determinism(True, torch.device("cuda")).enforced():
            seen.append(torch.are_deterministic_algorithms_enabled())
            with TURNS.working():
                pass
            captures.clear()
            captures.wait(10)
            seen.append(torch.are_deterministic_algorithms_enabled())
        trained.set()

    thread = threading.Thread(target=trains)
    thread.start()
    with undisturbed():
        captures.set()
        time.sleep(0.05)
        assert not seen  # it waits
    while captures.is_set():
        time.sleep(0.001)
    with undisturbed():
        assert not torch.are_deterministic_algorithms_enabled()
        captures.set()
        time.sleep(0.05)
        assert not trained.is_set()
    assert trained.wait(10) and seen[0] and not torch.are_deterministic_algorithms_enabled()
    thread.join(10)


# what cannot be


@pytest.mark.parametrize(
    ("overrides", "sections", "says"),
    [
        ((), {}, "set rollout.staleness to at least 1"),
        (
            ("rollout.staleness=1", "rollout.partial=true", "sampling.over_provision=1.5"),
            {},
            "leave rollout.partial out",
        ),
        (
            ("rollout.staleness=1", "rollout.engine=vllm"),
            {},
            "with staleness vllm generates while a step trains anyway",
        ),
        (
            ("rollout.staleness=1", "train.backend=fsdp"),
            {},
            "the engine is in the one process that trains",
        ),
        (("rollout.staleness=1", "cluster.kind=ray"), {}, "it is for a run without actors"),
        (
            ("rollout.staleness=1", "algorithm.dynamic_sampling=true"),
            {},
            "set algorithm.dynamic_sampling=false",
        ),
        (
            ("rollout.staleness=1", "sampling.over_provision=1.5"),
            {},
            "set sampling.over_provision=1",
        ),
        (("rollout.staleness=1", "rollout.kept=/elsewhere"), {}, "and nothing is generated"),
        (
            ("rollout.staleness=1",),
            {"adapter": {"kind": "qlora", "rank": 4}},
            "a base in 4 bits is made on the GPU",
        ),
    ],
    ids=str,
)
def test_what_it_does_not_go_with(
    make: Callable[..., Config], overrides: tuple[str, ...], sections: dict[str, Any], says: str
) -> None:
    with pytest.raises(InputError, match=says):
        make("x", "grpo", "rollout.overlap=true", *overrides, **sections)


def test_a_model_that_was_given_is_there_once(make: Callable[..., Config]) -> None:
    cfg = make("x", "grpo", *STALE, "rollout.overlap=true")
    model = load_model(cfg.model, None)
    given = CallerObjects(data=DATA, rewards=[_odd], module=model.module, tokenizer=model.tokenizer)
    with pytest.raises(InputError, match=r"rollout.overlap: a model that was given as an object"):
        train_config(cfg, given, SilentView())


def _odd(completions: list[str]) -> list[float]:
    return [float(len(text) % 2) for text in completions]
