"""Memory on a real GPU: the model's predictions, recovery when it runs out, optimizer states in
host memory, the engine's cache beside training. Skips without one.
"""

from __future__ import annotations

import asyncio
import copy
import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from reinforge.algorithms.losses.supervised import NLLLoss
from reinforge.backends import memory_model
from reinforge.backends.local import LocalBackend
from reinforge.backends.memory_model import GIB
from reinforge.backends.microbatch import auto_budget, facts_of
from reinforge.config.optimizer import OptimizerConfig
from reinforge.config.train import TrainConfig
from reinforge.core.batch import Totals, pack
from reinforge.core.engine import Completion, Sampling
from reinforge.core.errors import InputError
from reinforge.core.kv_pool import DeviceShare
from reinforge.core.sample import Sample
from reinforge.core.weights import Weights
from reinforge.engines.native import NativeEngine
from reinforge.models.causal import CausalModel
from reinforge.models.device_memory import device_memory

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    torch.cuda.empty_cache()


def make_model(dtype: torch.dtype = torch.bfloat16) -> CausalModel:
    torch.manual_seed(0)
    return CausalModel(Qwen2ForCausalLM(Qwen2Config(**SHAPE)).to("cuda", dtype).eval())


def make_samples(count: int, length: int = 512) -> list[Sample]:
    generator = torch.Generator().manual_seed(1)
    return [
        Sample.from_tokens(
            f"s{i}",
            torch.randint(3, 32000, (length,), generator=generator).tolist(),
            [False] + [True] * (length - 1),
        )
        for i in range(count)
    ]


def one_step(backend: LocalBackend, samples: list[Sample]) -> dict[str, float]:
    batches = pack(samples, backend.budget)
    return {
        **backend.forward_backward(batches, NLLLoss(), Totals.of(batches)),
        **backend.step().metrics(),
    }


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_model_predicts_the_peak(checkpointing: bool) -> None:
    model = make_model()
    if checkpointing:
        model.plain.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    backend = LocalBackend(model, TrainConfig(steps=3, tokens_per_microbatch=16384), total_steps=3)
    samples = make_samples(64)
    one_step(backend, samples)
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    one_step(backend, samples)
    facts = facts_of(model)
    assert facts.checkpointing == checkpointing
    predicted = memory_model.total(memory_model.training(facts, 16384))
    measured = torch.cuda.max_memory_allocated()
    assert predicted == pytest.approx(measured, rel=0.25), memory_model.training(facts, 16384)


def test_the_automatic_budget_fits() -> None:
    """With a tenth of the memory the budget is smaller, and nothing has to be done twice."""
    whole = torch.cuda.get_device_properties(0).total_memory
    model = make_model()
    free = min(8 * GIB, whole // 2)
    facts = facts_of(model)
    budget = memory_model.budget(facts, free)
    assert 1024 <= budget <= auto_budget(model)
    backend = LocalBackend(model, TrainConfig(steps=2, tokens_per_microbatch=budget), total_steps=2)
    torch.cuda.set_per_process_memory_fraction((free + memory_model.weight_bytes(facts)) / whole)
    samples = make_samples(3 * budget // 512 + 1)
    for _ in range(2):
        assert "train/oom" not in one_step(backend, samples)


def test_a_real_lack_of_memory_is_recovered_from() -> None:
    """A micro-batch that needs far more than there is: smaller ones give the same gradient, and
    later steps fit at once.
    """
    samples = make_samples(96)
    model = make_model()
    twin = CausalModel(copy.deepcopy(model.module))
    plain = LocalBackend(twin, TrainConfig(steps=2, tokens_per_microbatch=4096), total_steps=2)
    batches = pack(samples, 4096)
    plain.forward_backward(batches, NLLLoss(), Totals.of(batches))
    want = {
        name: m.grad.float().cpu()
        for name, m in plain.optimizer.masters.items()
        if m.grad is not None
    }
    del plain, twin
    gc.collect()
    torch.cuda.empty_cache()
    backend = LocalBackend(model, TrainConfig(steps=2, tokens_per_microbatch=49152), total_steps=2)
    facts = facts_of(model)
    room = memory_model.total(memory_model.training(facts, 16384))
    assert room < memory_model.total(memory_model.training(facts, 49152)) / 2
    torch.cuda.set_per_process_memory_fraction(
        room / torch.cuda.get_device_properties(0).total_memory
    )
    big = pack(samples, backend.budget)
    assert len(big) == 1
    backend.forward_backward(big, NLLLoss(), Totals.of(big))
    for name, master in backend.optimizer.masters.items():
        assert master.grad is not None
        gap = (master.grad.float().cpu() - want[name]).norm() / want[name].norm().clamp(min=1e-12)
        assert float(gap) < 0.05, name  # bfloat16 sums in another order
    short = backend.step().out_of_memory
    assert short is not None and short.times >= 1 and backend.budget == short.new_budget <= 24576
    for _ in range(2):
        metrics = one_step(backend, samples)
    assert "train/oom" not in metrics


def test_a_row_that_does_not_fit_alone_says_so() -> None:
    model = make_model()
    backend = LocalBackend(model, TrainConfig(steps=2, tokens_per_microbatch=4096), total_steps=2)
    used = torch.cuda.memory_allocated() + (64 << 20)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(
        used / torch.cuda.get_device_properties(0).total_memory
    )
    batches = pack(make_samples(2, 4096), 4096)
    with pytest.raises(InputError, match="a row of 4096 tokens does not fit"):
        backend.forward_backward(batches, NLLLoss(), Totals.of(batches))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offloaded_states_learn_the_same_and_leave_the_device(dtype: torch.dtype) -> None:
    """The CPU's AdamW rounds elsewhere than the GPU's; the weights agree far below a step's size,
    and the states are not on the GPU. A gradient that is nearly 0 can have another sign the second
    time (sums of bfloat16 in another order), and AdamW steps by the sign: a few (those of key
    biases above all, which attention does not depend on).
    """
    samples = make_samples(16)
    states = []
    for offload in (False, True):
        model = make_model(dtype)
        cfg = TrainConfig(
            steps=3,
            learning_rate=1e-3,
            tokens_per_microbatch=4096,
            optimizer=OptimizerConfig(offload=offload),
        )
        backend = LocalBackend(model, cfg, total_steps=3)
        for _ in range(3):
            one_step(backend, samples)
        gc.collect()
        states.append(
            (
                {n: m.detach().cpu().clone() for n, m in backend.optimizer.masters.items()},
                torch.cuda.memory_allocated(),
            )
        )
        if offload:
            assert all(
                m.device.type == "cpu" and m.is_pinned() for m in backend.optimizer.masters.values()
            )
            assert all(
                torch.equal(p.detach().cpu(), backend.optimizer.masters[n].to(dtype))
                for n, p in backend.optimizer.parameters.items()
            )
        facts = replace(facts_of(model), offload=False)
        del backend, model
        gc.collect()
        torch.cuda.empty_cache()
    (plain, plain_bytes), (moved, moved_bytes) = states
    assert plain_bytes - moved_bytes == pytest.approx(memory_model.optimizer_bytes(facts), rel=0.1)
    gaps = torch.cat([(plain[name] - moved[name]).abs().flatten() for name in plain])
    # three steps of 1e-3
    assert float((gaps > 3e-4).float().mean()) <= (0.0 if dtype == torch.float32 else 1e-3)


def test_the_cache_takes_what_is_free_and_learns_that_it_may_stay() -> None:
    """It is given back before the first step, of which nothing is known, and stays from then on:
    training the small model leaves nearly all of the GPU.
    """
    model = make_model()
    backend = LocalBackend(model, TrainConfig(steps=3, tokens_per_microbatch=4096), total_steps=3)
    memory = device_memory(model.device)
    assert memory is not None
    share = DeviceShare(memory_model.moment_bytes(facts_of(model)))
    engine = NativeEngine(model, max_batch=64, share=share)
    size = engine.blocks * engine.block * memory_model.kv_token_bytes(facts_of(model))
    assert 0.8 * memory.free < size < 0.9 * memory.free

    async def rollouts(key: int) -> list[Completion]:
        prompts = [s.tokens.tolist() for s in make_samples(8, 40)]
        jobs = [engine.generate(p, Sampling(20), key=key + i, n=4) for i, p in enumerate(prompts)]
        return [c for group in await asyncio.gather(*jobs) for c in group]

    samples = make_samples(16)
    for version in range(1, 4):
        found = asyncio.run(rollouts(100 * version))
        assert all(len(c.tokens) == len(c.logprobs) for c in found)
        asyncio.run(engine.sleep())
        assert (engine.cache is None) == (version == 1)
        assert "train/oom" not in one_step(backend, samples)
        asyncio.run(engine.update(Weights("shared", module=model.module), version))
