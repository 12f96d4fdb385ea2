"""The native engine with `rollout.precision` and `rollout.cache_precision: fp8`, on the CPU. Its
kernels are in tests/gpu.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from helpers.toys import make_model
from reinforge.config.base import Precision
from reinforge.core.batch import Batch
from reinforge.core.engine import Completion, Sampling
from reinforge.core.sample import Sample
from reinforge.core.weights import Weights
from reinforge.engines.native import NativeEngine
from reinforge.engines.native.blocks import BlockPool
from reinforge.engines.native.drafts import Speculation
from reinforge.models.causal import CausalModel
from reinforge.models.fp8_layers import Fp8Layers, Source

PROMPTS = [[5, 6, 7, 8, 9], list(range(3, 40)), [60, 1]]


def generate(engine: NativeEngine, new: int = 24) -> list[Completion]:
    async def all_of_them() -> list[list[Completion]]:
        return await asyncio.gather(
            *(
                engine.generate(prompt, Sampling(new), key=i, n=2)
                for i, prompt in enumerate(PROMPTS)
            )
        )

    return [one for group in asyncio.run(all_of_them()) for one in group]


def gap(model: CausalModel, completions: list[Completion], source: Source) -> float:
    """Mean |log-prob of the engine - that of the trainer|, whose products are made so."""
    gaps = []
    layers = Fp8Layers.of(model, "train.precision")
    for i, completion in enumerate(completions):
        prompt = PROMPTS[i // 2]
        trained = [False] * len(prompt) + [True] * len(completion.tokens)
        batch = Batch.pack([Sample.from_tokens("x", [*prompt, *completion.tokens], trained)])
        with torch.no_grad(), layers.using(source):
            theirs = model.logprobs(batch, temperature=1.0)[0]
        gaps.append((torch.tensor(completion.logprobs) - theirs).abs().mean())
    return float(torch.stack(gaps).mean())


@pytest.mark.parametrize("arch", ["llama", "gemma2"])  # with and without parts that are fused
def test_it_samples_from_what_fp8_training_computes(arch: str) -> None:
    model = make_model(arch)
    completions = generate(NativeEngine(model, kv_gib=0.01, precision="fp8"))
    of_fp8 = gap(model, completions, "fresh")
    of_model = gap(model, completions, "plain")
    assert of_fp8 < 1e-4 and of_model > 0.003
    assert of_fp8 < 0.02 * of_model


def test_the_trainer_computes_as_before() -> None:
    model = make_model()
    completions = generate(NativeEngine(model, kv_gib=0.01))
    before = gap(model, completions, "plain")
    generate(NativeEngine(model, kv_gib=0.01, precision="fp8"))
    layers = Fp8Layers.found(model)
    assert layers is not None and layers.source == "plain"
    assert gap(model, completions, "plain") == before < 1e-5


def test_an_engine_in_the_precision_of_the_model_stays_there() -> None:
    """Though the trainer multiplies in FP8."""
    model = make_model()
    want = generate(NativeEngine(model, kv_gib=0.01))
    layers = Fp8Layers.of(model, "train.precision")
    layers.source = "fresh"
    got = generate(NativeEngine(model, kv_gib=0.01))
    assert layers.source == "fresh"
    assert [one.tokens for one in got] == [one.tokens for one in want]
    assert gap(model, got, "plain") < 1e-5


def change(model: CausalModel) -> None:
    with torch.no_grad():
        for i, weight in enumerate(model.layers.parameters()):
            generator = torch.Generator().manual_seed(i)
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.2)


def test_new_weights_are_copied_again() -> None:
    model = make_model()
    engine = NativeEngine(model, kv_gib=0.01, precision="fp8")
    first = generate(engine)
    change(model)
    asyncio.run(engine.update(Weights("shared", module=model.module), 1))
    second = generate(engine)
    fresh = make_model()
    change(fresh)
    want = generate(NativeEngine(fresh, kv_gib=0.01, precision="fp8"))
    assert [one.tokens for one in second] == [one.tokens for one in want]
    assert [one.logprobs for one in second] == [one.logprobs for one in want]
    assert [one.tokens for one in second] != [one.tokens for one in first]


def test_new_weights_in_the_middle_of_an_answer() -> None:
    """What was sampled before them is computed again, with copies of the new ones."""
    model = make_model()
    engine = NativeEngine(model, kv_gib=0.01, precision="fp8")

    async def run() -> list[Completion]:
        work = asyncio.ensure_future(engine.generate(PROMPTS[0], Sampling(30), key=0))
        while engine.stats.generated_tokens < 10:
            await asyncio.sleep(0)
        change(model)
        await engine.update(Weights("shared", module=model.module), 1)
        return list(await work)

    (found,) = asyncio.run(run())
    old = found.versions.count(0)
    assert 10 <= old < 30
    trained = [False] * len(PROMPTS[0]) + [True] * 30
    batch = Batch.pack([Sample.from_tokens("x", [*PROMPTS[0], *found.tokens], trained)])
    with torch.no_grad(), Fp8Layers.of(model, "train.precision").using("fresh"):
        theirs = model.logprobs(batch, temperature=1.0)[0]
    gaps = (torch.tensor(found.logprobs) - theirs).abs()
    assert gaps[old:].max() < 1e-3 and gaps[:old].mean() > 0.05


@pytest.mark.parametrize("settings", [{"max_batch": 2}, {"prefix_cache": True}])
def test_rows_and_prefixes_change_nothing(settings: dict[str, Any]) -> None:
    want = generate(NativeEngine(make_model(), kv_gib=0.01, precision="fp8"))
    engine = NativeEngine(make_model(), kv_gib=0.01, precision="fp8", **settings)
    for _ in range(2):
        got = generate(engine)
        assert [one.tokens for one in got] == [one.tokens for one in want]


def test_scores_of_given_tokens_are_in_the_same_precision() -> None:
    model = make_model()
    engine = NativeEngine(model, kv_gib=0.01, precision="fp8")
    completion = generate(engine)[0]
    tokens = [*PROMPTS[0], *completion.tokens]
    own, _ = asyncio.run(engine.likeliest(tokens, len(PROMPTS[0]), k=1))
    torch.testing.assert_close(
        torch.tensor(own), torch.tensor(completion.logprobs), atol=1e-4, rtol=0
    )


# ---- the cache ----


def test_so_many_tokens_fit_a_cache_in_fp8() -> None:
    """Two layers of two heads of 8 numbers: a byte each and four of a scale, or four bytes."""
    plain, small = (
        NativeEngine(make_model(), kv_gib=0.001, cache_precision=precision)
        for precision in ("model", "fp8")
    )
    assert plain.blocks == int(0.001 * 2**30) // (16 * 2 * 2 * 2 * 32)
    assert small.blocks == int(0.001 * 2**30) // (16 * 2 * 2 * 2 * 12)
    generate(small)
    assert small.cache is not None
    taken = sum(part.numel() * part.element_size() for part in small.cache.tensors)
    assert taken == (small.blocks + 1) * 16 * 2 * 2 * 2 * 12


def test_a_cache_in_fp8_is_close_and_not_the_same() -> None:
    model = make_model()
    completions = generate(NativeEngine(model, kv_gib=0.01, cache_precision="fp8"))
    assert 1e-4 < gap(model, completions, "plain") < 0.01


@pytest.mark.parametrize("settings", [{"max_batch": 1}, {"prefix_cache": True}])
def test_nobody_can_tell_how_the_cache_was_filled(settings: dict[str, Any]) -> None:
    """A prompt that is computed for two or for one, in one piece or found in the cache."""
    want = generate(NativeEngine(make_model(), kv_gib=0.01, cache_precision="fp8"))
    engine = NativeEngine(make_model(), kv_gib=0.01, cache_precision="fp8", **settings)
    for _ in range(2):
        got = generate(engine)
        assert [one.tokens for one in got] == [one.tokens for one in want]
        for mine, other in zip(got, want, strict=True):
            torch.testing.assert_close(
                torch.tensor(mine.logprobs), torch.tensor(other.logprobs), atol=1e-4, rtol=0
            )


def test_who_had_to_leave_comes_back_with_the_same_cache() -> None:
    want = generate(NativeEngine(make_model(), kv_gib=0.01, cache_precision="fp8"), new=60)
    scarce = NativeEngine(make_model(), kv_gib=0.01, cache_precision="fp8")
    scarce.blocks = 12
    scarce.pool = BlockPool(12, 16)
    got = generate(scarce, new=60)
    assert scarce.stats.preemptions > 0
    assert [one.tokens for one in got] == [one.tokens for one in want]


@pytest.mark.parametrize("precision", ["model", "fp8"])
def test_drafts_are_verified_against_the_same_cache(precision: Precision) -> None:
    settings = {"kv_gib": 0.01, "precision": precision, "cache_precision": "fp8"}
    want = generate(NativeEngine(make_model(), **settings))
    engine = NativeEngine(make_model(), speculation=Speculation(3, None, 1000), **settings)
    got = generate(engine)
    assert engine.stats.draft_steps > 0
    assert [one.tokens for one in got] == [one.tokens for one in want]
