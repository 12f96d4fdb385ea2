"""How much of a device the cache takes, when it stays while training, and what happens where there
is less than was counted on. The numbers of a GPU are stand-ins, put where they are read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.tiny_runs import EVAL, launch, lines
from helpers.toys import make_model, run, tokens_of
from reinforge.backends.memory_model import gradient_bytes, passing_bytes
from reinforge.backends.microbatch import facts_of
from reinforge.build.engines import device_share
from reinforge.build.inputs import ModelInputs
from reinforge.checkpoint import store
from reinforge.config.rules.facts import at_once
from reinforge.config.schema import Config
from reinforge.core.engine import Sampling
from reinforge.core.errors import InputError
from reinforge.core.kv_pool import DeviceShare, gpu_room, pool_blocks, stays, too_large
from reinforge.core.model_facts import ModelFacts
from reinforge.core.weights import Weights
from reinforge.engines.native import NativeEngine
from reinforge.engines.native import engine as native
from reinforge.models.attention import KVCache
from reinforge.models.causal import CausalModel
from reinforge.models.device_memory import DeviceMemory

GIB = 2**30
SEVEN = ModelFacts(28, 3584, 18944, 28, 4, 128, 152064, tied=False)  # the shape of Qwen2.5-7B
BLOCK_BYTES = 16 * 2 * 28 * 4 * 128 * 2
TOY_BLOCK = 16 * 2 * 2 * 2 * 8 * 4  # of make_model: 2 layers of 2 heads of 8 numbers, float32


# the formulas


def test_the_pool_takes_what_training_does_not_need() -> None:
    """7B weights with 120 GiB free: less 2.2 GiB for a forward over prompts and 0.6 for logits,
    nine tenths are the cache. Moments that are still to be made are left out.
    """
    work = 16384 * 2 * (4 * 3584 + 3 * 18944) + 16 * 256 * 152064
    assert work == 2_954_887_168
    assert gpu_room(SEVEN, 120 * GIB, 256, DeviceShare()) == int(0.9 * (120 * GIB - work))
    moments = 8 * SEVEN.parameters()
    room = gpu_room(SEVEN, 120 * GIB, 256, DeviceShare(to_come=moments))
    assert room == int(0.9 * (120 * GIB - work - moments))
    both = gpu_room(SEVEN, 120 * GIB, 256, DeviceShare(engines=2))
    assert 2 * both == pytest.approx(0.9 * (120 * GIB - 2 * work), abs=2)
    assert gpu_room(SEVEN, 2 * GIB, 256, DeviceShare()) == 0


def test_no_more_blocks_than_the_longest_sequences_fill() -> None:
    room = gpu_room(SEVEN, 120 * GIB, 256, DeviceShare())
    assert pool_blocks(BLOCK_BYTES, room, rows=256, longest=1000) == 256 * 63
    # 241 of 256 sequences of 8,192 tokens; 0.4 of what is free held 109
    found = pool_blocks(BLOCK_BYTES, room, rows=256, longest=8192)
    assert found == room // BLOCK_BYTES == 241 * 512 + 100
    assert pool_blocks(BLOCK_BYTES, room, rows=256, longest=None) == found
    assert pool_blocks(BLOCK_BYTES, room, rows=256, longest=8192, kv_gib=7.0) == 8192
    assert pool_blocks(BLOCK_BYTES, 0, rows=256, longest=8192) == 8


def test_what_stays_beside_training() -> None:
    whole = 120 * GIB
    assert stays(10 * GIB, whole, None) and not stays(11 * GIB, whole, None)
    # six GiB more are left free
    assert stays(50 * GIB, whole, 56 * GIB) and not stays(50 * GIB, whole, 55 * GIB)
    assert stays(10 * GIB, whole, 0)


# the engine


class FakeGpu:
    """What is free of a device, in the place of `device_memory`."""

    def __init__(self, free: int, whole: int = 1 << 30, held: int = 0):
        self.free = free
        self.whole = whole
        self.held = held  # by torch's allocator, unused

    def __call__(self, device: torch.device) -> DeviceMemory:
        return DeviceMemory(self.free, self.free - self.held, self.whole)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    found = FakeGpu(512 << 20)
    monkeypatch.setattr(native, "device_memory", found)
    return found


def toy_work(rows: int) -> int:
    """Of a forward over prompts (hidden 32, MLP of 64) and of logits."""
    vocabulary = make_model().config.vocab_size
    return 16384 * 4 * (4 * 32 + 3 * 64) + 16 * rows * vocabulary


def test_the_engine_counts_on_what_is_free_and_unused(gpu: FakeGpu) -> None:
    gpu.held = 100 << 20
    engine = NativeEngine(make_model(), max_batch=64)
    assert engine.blocks == int(0.9 * ((512 << 20) - toy_work(64))) // TOY_BLOCK
    assert engine.blocks * TOY_BLOCK > 400 << 20
    less = NativeEngine(make_model(), max_batch=64, share=DeviceShare(to_come=200 << 20))
    assert less.blocks == int(0.9 * ((312 << 20) - toy_work(64))) // TOY_BLOCK


async def rollout(engine: NativeEngine) -> list[list[int]]:
    prompts = [tokens_of(9 + i, i) for i in range(3)]
    jobs = [engine.generate(p, Sampling(40, ignore_eos=True), key=i) for i, p in enumerate(prompts)]
    return [group[0].tokens for group in await asyncio.gather(*jobs)]


def train(engine: NativeEngine, version: int) -> None:
    """What the loop does between rollouts, as far as the engine sees it."""
    run(engine.sleep())
    run(engine.update(Weights("shared", module=engine.model.module), version))


def test_a_large_cache_is_given_back_until_training_was_seen(gpu: FakeGpu) -> None:
    """A fifth of the device: too much to stay untold. Training leaves 300 MiB at its peak, which is
    room for it; later it leaves 200, which is not.
    """
    size = 205 << 20
    engine = NativeEngine(make_model(), kv_gib=size / GIB)
    want = run(rollout(engine))
    train(engine, 1)
    assert engine.cache is None
    gpu.free, gpu.held = 900 << 20, 600 << 20
    assert run(rollout(engine)) == want
    train(engine, 2)
    first = engine.cache
    assert first is not None
    # now it is part of what is taken
    gpu.free, gpu.held = (900 << 20) - size, 600 << 20
    assert run(rollout(engine)) == want and engine.cache is first
    train(engine, 3)
    assert engine.cache is first
    gpu.free, gpu.held = (800 << 20) - size, 600 << 20
    assert run(rollout(engine)) == want and engine.cache is first
    train(engine, 4)
    assert engine.cache is None


def test_steps_that_trained_nothing_say_nothing(gpu: FakeGpu) -> None:
    """As while a critic warms up: moments of the policy are still to come."""
    engine = NativeEngine(make_model(), kv_gib=0.2)
    run(rollout(engine))
    train(engine, 0)
    run(rollout(engine))
    run(engine.sleep())
    assert engine.cache is None
    run(engine.update(Weights("shared", module=engine.model.module), 1))
    run(rollout(engine))
    run(engine.sleep())
    assert engine.cache is not None


def test_two_engines_on_a_device_do_not_count_on_the_same_room(gpu: FakeGpu) -> None:
    engine = NativeEngine(make_model(), kv_gib=0.2, share=DeviceShare(engines=2))
    run(rollout(engine))
    train(engine, 1)
    run(rollout(engine))
    train(engine, 2)
    assert engine.cache is None


def test_a_small_cache_stays(gpu: FakeGpu) -> None:
    engine = NativeEngine(make_model(), kv_gib=0.08)
    run(rollout(engine))
    train(engine, 1)
    assert engine.cache is not None


# less than was counted on


def only(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has room for so many blocks."""
    real = KVCache.allocate

    def allocate(shapes: Any, asked: int, *rest: Any) -> KVCache:
        if asked > blocks:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(shapes, asked, *rest)

    monkeypatch.setattr(KVCache, "allocate", allocate)


def exact_engine(**settings: Any) -> NativeEngine:
    return NativeEngine(CausalModel(make_model().module, exact=True), kv_gib=0.01, **settings)


def test_a_cache_that_finds_no_room_becomes_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three sequences of four blocks each do not fit together any more: the same answers."""
    want = run(rollout(exact_engine()))
    only(11, monkeypatch)
    engine = exact_engine()
    assert engine.blocks == int(0.01 * GIB) // TOY_BLOCK > 100
    assert run(rollout(engine)) == want
    assert 4 <= engine.blocks <= 10 and engine.state() == {"blocks": engine.blocks, "block": 16}
    assert engine.stats.preemptions > 0 and engine.pool.free == engine.pool.total == engine.blocks


def test_a_cache_keeps_its_tokens_where_blocks_have_another_size() -> None:
    """A checkpoint of a GPU, whose blocks are larger, or one that does not tell their size."""
    engine = exact_engine()
    engine.load({"blocks": 40, "block": 64})
    assert engine.blocks == engine.pool.total == 160
    engine.load({"blocks": 40})
    assert engine.blocks == engine.pool.total == 40


def test_where_one_sequence_has_no_room_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    only(3, monkeypatch)
    with pytest.raises(
        InputError, match=r"rollout\.kv_gib.*no .* GiB left .* one sequence of 51 tokens"
    ):
        run(rollout(exact_engine()))


def test_a_cache_that_no_machine_has_is_refused(make: Callable[..., Config]) -> None:
    """By a run before anything is loaded into it, and by `plan`."""
    settings = ("grpo", "rollout={max_new_tokens: 8, kv_gib: 1000000}")
    with pytest.raises(InputError, match=r"rollout\.kv_gib: 1e\+06 GiB are asked for, and there"):
        launch(make("run", *settings))
    assert too_large(2.0, 2 * 2**30) is None is too_large(None, 0)


def test_a_run_records_the_smaller_cache(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    only(31, monkeypatch)
    cfg = make("run", "grpo", "train.steps=1")
    launch(cfg)
    checkpoint = store.latest(Path(cfg.run.dir))
    assert checkpoint is not None
    recorded = store.load(checkpoint)[1]["counters"]["engine/blocks"]
    assert 22 <= recorded <= 30


# what runs leave to training


def share_of(cfg: Config, model: CausalModel, ranks: int = 1, **changes: Any) -> DeviceShare:
    inputs = ModelInputs(cfg, False, 128, frozenset(), 64, **changes)
    return device_share(inputs, model, ranks)


def test_moments_are_left_to_every_optimizer(make: Callable[..., Config]) -> None:
    model = make_model()
    weights = sum(p.numel() for p in model.module.parameters())
    assert share_of(make(), model) == DeviceShare(8 * weights)
    assert share_of(make(), model, ranks=4).to_come == 2 * weights
    assert share_of(make("run", "ppo", critic={}), model).to_come == 16 * weights
    assert share_of(make("run", "ppo", critic={"shared": True}), model).to_come == 8 * weights
    assert share_of(make("run", "grpo", "train.optimizer.offload=true"), model) == DeviceShare()
    assert share_of(make(), model, trains=False) == DeviceShare()
    assert share_of(make("run", "nash_md"), model) == DeviceShare(8 * weights, engines=2)


def test_where_a_step_trains_meanwhile_a_pass_of_it_has_room(make: Callable[..., Config]) -> None:
    """Of one model after the other; no micro-batch has more tokens than the longest sequence and
    the step ask for.
    """
    model = make_model()
    settings = ("rollout.staleness=1", "train.prompts_per_step=1", "algorithm.group_size=2")

    def passing(budget: int, *algorithm: str, **sections: Any) -> int:
        name = algorithm[0] if algorithm else "grpo"
        shares = [
            share_of(
                make("run", name, *settings, f"rollout.overlap={overlap}", **sections),
                model,
                budget=budget,
            )
            for overlap in ("true", "false")
        ]
        return shares[0].to_come - shares[1].to_come

    facts = facts_of(model)
    assert passing(100) == passing_bytes(facts, 100)
    assert passing(10) == passing_bytes(facts, 64)  # the longest sequence
    assert passing(10**6) == passing_bytes(facts, 128)  # all of a step
    both = passing(100, "ppo", critic={})
    assert both == passing(100) + gradient_bytes(facts)
    assert passing(100, "ppo", critic={"shared": True}) == passing(100)


def test_an_evaluation_gives_the_cache_back_to_supervised_training(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[int] = []

    async def sleep(self: NativeEngine) -> None:
        slept.append(self.version)

    monkeypatch.setattr(NativeEngine, "sleep", sleep)
    cfg = make(
        "run",
        "sft",
        "train.steps=2",
        "eval.every=1",
        "eval.at_start=false",
        rewards=[{"name": "helpers.toy_rewards:odd"}],
    )
    launch(cfg, eval_data=EVAL)
    assert slept == [1, 2] and any("eval/reward" in line for line in lines(cfg))


def test_blocks_are_those_of_the_sequences_of_a_step(make: Callable[..., Config]) -> None:
    asked = ["train.prompts_per_step=32", "algorithm.group_size=8"]
    assert at_once(make("run", "grpo", *asked)) == 256
    assert at_once(make("run", "grpo", *asked, "rollout.max_batch=100")) == 100
    # one step's after the other's, unless a step cuts some that the next one goes on with
    assert at_once(make("run", "grpo", *asked, "rollout.staleness=1")) == 256
    carried = ("rollout.partial=true", "rollout.staleness=1", "sampling.over_provision=1.25")
    assert at_once(make("run", "grpo", *asked, *carried, "rollout.max_batch=1000")) == 640
    assert at_once(make("run", "grpo", *asked, "sampling.over_provision=1.25")) == 320
    for more in ("data.eval.size=4", "rollout.prefix_cache=true"):
        assert at_once(make("run", "grpo", *asked, more)) == 512
