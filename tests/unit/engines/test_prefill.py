"""Prompts on their way into the cache: in pieces, shared by requests, and found again from one turn
to the next.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from helpers.toys import ARCHS, make_model, make_module, run, tokens_of, true_logprobs
from reinforge.core.engine import Completion, Sampling
from reinforge.core.weights import Weights
from reinforge.engines.native import NativeEngine
from reinforge.engines.native import engine as native
from reinforge.engines.native.blocks import BlockPool, block_keys
from reinforge.engines.native.decoder import bucket
from reinforge.models.causal import CausalModel
from reinforge.models.fused_decode import FusedDecode

PARAMS = Sampling(12, 0.9, ignore_eos=True)


def make_engine(blocks: int = 256, arch: str = "llama", **kw: bool) -> NativeEngine:
    engine = NativeEngine(make_model(arch), **kw)
    engine.blocks = blocks
    engine.pool = BlockPool(blocks, native.BLOCK)
    return engine


def equal(a: list[Completion], b: list[Completion]) -> None:
    assert [c.tokens for c in a] == [c.tokens for c in b]
    for x, y in zip(a, b, strict=True):
        assert x.logprobs == pytest.approx(y.logprobs, abs=1e-5)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("budget", [16, 20, 48])
def test_a_long_prompt_in_pieces_says_the_same(
    monkeypatch: pytest.MonkeyPatch, arch: str, budget: int
) -> None:
    """A prompt of 75 tokens in pieces while a short one, which came first, is decoded
    in between.
    """

    async def work(engine: NativeEngine) -> list[list[Completion]]:
        jobs = [
            engine.generate(tokens_of(length, length), PARAMS, key=length, n=3)
            for length in (5, 75, 33)
        ]
        return list(await asyncio.gather(*jobs))

    want = run(work(make_engine(arch=arch)))
    monkeypatch.setattr(native, "PREFILL_TOKENS", budget)
    engine = make_engine(arch=arch)
    for a, b in zip(run(work(engine)), want, strict=True):
        equal(a, b)
    assert engine.stats.prompt_tokens == 5 + 75 + 33 and engine.pool.free == engine.pool.total


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("budget", [20, 200])
def test_prompts_through_the_fused_trunk_say_the_same(
    monkeypatch: pytest.MonkeyPatch, arch: str, budget: int
) -> None:
    """Whole and in pieces, with a window and norms of heads; prompts that begin alike too."""
    monkeypatch.setattr(native, "PREFILL_TOKENS", budget)
    prompts = [tokens_of(5, 5), tokens_of(75, 75), tokens_of(75, 75)[:40] + tokens_of(9, 9)]

    async def work(engine: NativeEngine) -> list[list[Completion]]:
        jobs = [engine.generate(p, PARAMS, key=i, n=2) for i, p in enumerate(prompts)]
        return list(await asyncio.gather(*jobs))

    want = run(work(make_engine(arch=arch)))
    engine = make_engine(arch=arch)
    fused = FusedDecode.of(engine.model)
    assert fused is not None
    seen = []
    hidden = fused.hidden

    def watched(tokens: torch.Tensor, layout: Any) -> torch.Tensor:
        seen.append(len(tokens))
        return hidden(tokens, layout)

    monkeypatch.setattr(fused, "hidden", watched)
    engine.decoder.fused = fused
    for a, b in zip(run(work(engine)), want, strict=True):
        equal(a, b)
    assert sum(seen) == engine.stats.prompt_tokens and (len(seen) > 3) == (budget == 20)


def test_prompts_of_an_exact_model_go_through_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training repeats them to the bit."""
    model = CausalModel(make_module("llama"), exact=True)
    engine = NativeEngine(model)
    engine.decoder.fused = FusedDecode.of(model)
    assert engine.decoder.fused is not None
    monkeypatch.setattr(engine.decoder.fused, "hidden", None)
    [said] = run(engine.generate(tokens_of(9, 9), PARAMS, key=1))
    assert len(said.tokens) == 12


def test_a_prompt_shorter_than_a_block_that_meets_an_almost_spent_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """12 of 16 tokens are spent on the first prompt.

    The second has 10: more than are left, and less than the block that a piece has at least.
    """

    async def work(engine: NativeEngine) -> list[list[Completion]]:
        return list(
            await asyncio.gather(
                *(engine.generate(tokens_of(n, n), PARAMS, key=n) for n in (12, 10))
            )
        )

    want = run(work(make_engine()))
    monkeypatch.setattr(native, "PREFILL_TOKENS", 16)
    engine = make_engine()
    for a, b in zip(run(work(engine)), want, strict=True):
        equal(a, b)
    assert engine.stats.prompt_tokens == 12 + 10


def test_requests_with_the_same_prompt_are_prefilled_together() -> None:
    async def work(engine: NativeEngine) -> list[list[Completion]]:
        return list(
            await asyncio.gather(*(engine.generate(tokens_of(40), PARAMS, key=i) for i in range(6)))
        )

    engine = make_engine()
    together = run(work(engine))
    assert engine.stats.prompt_tokens == 40
    for i, found in enumerate(together):
        equal(found, run(make_engine().generate(tokens_of(40), PARAMS, key=i)))


def test_who_is_cancelled_between_two_pieces_takes_nothing_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first sample of a prompt, whose blocks are being filled, leaves; its siblings and a
    newcomer come out as ever.
    """
    monkeypatch.setattr(native, "PREFILL_TOKENS", 16)

    async def work() -> tuple[list[Completion], list[Completion], NativeEngine]:
        engine = make_engine()
        first = asyncio.ensure_future(engine.generate(tokens_of(70), PARAMS, key=1))
        second = asyncio.ensure_future(engine.generate(tokens_of(70), PARAMS, key=2))
        while not any(0 < fork.done < 70 for fork in engine._entering):
            await asyncio.sleep(0)
        first.cancel()
        third = asyncio.ensure_future(engine.generate(tokens_of(20, 9), PARAMS, key=3))
        return await second, await third, engine

    second, third, engine = run(work())
    equal(second, run(make_engine().generate(tokens_of(70), PARAMS, key=2)))
    equal(third, run(make_engine().generate(tokens_of(20, 9), PARAMS, key=3)))
    assert engine.pool.free == engine.pool.total


def test_an_update_between_two_pieces_starts_the_prompt_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "PREFILL_TOKENS", 16)
    new = make_module(seed=1)

    async def work() -> tuple[list[Completion], NativeEngine]:
        engine = make_engine()
        task = asyncio.ensure_future(engine.generate(tokens_of(70), PARAMS, key=1))
        while not any(0 < fork.done < 70 for fork in engine._entering):
            await asyncio.sleep(0)
        with torch.no_grad():
            for p, q in zip(engine.model.module.parameters(), new.parameters(), strict=True):
                p.copy_(q)
        await engine.update(Weights("shared", module=engine.model.module), 1)
        return await task, engine

    [found], engine = run(work())
    assert engine.pool.free == engine.pool.total, "what it held before the update was given back"
    exact = true_logprobs(new, tokens_of(70) + found.tokens, 0.9)[69:]
    assert float((torch.tensor(found.logprobs) - exact).abs().max()) < 1e-5


def test_a_cancelled_row_writes_nothing_into_blocks_that_a_long_prompt_has_taken_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU, where rows are counted in buckets: three of four go on, so their rows are not
    made anew. The fourth is cancelled, and a long prompt is computed in pieces into the very blocks
    that it held.
    """
    monkeypatch.setattr(native, "PREFILL_TOKENS", 16)
    long = Sampling(60, ignore_eos=True)

    async def work() -> list[Completion]:
        # four sequences of 5 blocks: the newcomer can only have those of the one who leaves
        engine = make_engine(blocks=20)
        monkeypatch.setattr(engine.decoder, "size", bucket)
        tasks = [
            asyncio.ensure_future(engine.generate(tokens_of(5, i), long, key=i)) for i in range(4)
        ]
        while len(engine._running) < 4:
            await asyncio.sleep(0)
            assert not any(task.done() for task in tasks)
        newcomer = asyncio.ensure_future(engine.generate(tokens_of(68, 9), PARAMS, key=9))
        while not engine._waiting:
            await asyncio.sleep(0)
        # as when its task is cancelled, with no round in between: the next one gives its blocks
        # away
        engine._drop(engine._running[3])
        found = await newcomer
        assert not any(task.done() for task in tasks[:3]), (
            "they were decoded while the newcomer came in"
        )
        for task in tasks[:3]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return found

    equal(run(work()), run(make_engine().generate(tokens_of(68, 9), PARAMS, key=9)))


def test_a_conversation_computes_each_turn_once() -> None:
    """The second turn continues prompt and answer of the first: only what is new, and the block
    that was not full, is computed.
    """

    async def work(engine: NativeEngine) -> tuple[list[Completion], list[int]]:
        turns = []
        context = tokens_of(40)
        counts = []
        for turn in range(3):
            before = engine.stats.prompt_tokens
            done = (await engine.generate(context, PARAMS, key=turn))[0]
            counts.append(engine.stats.prompt_tokens - before)
            turns.append(done)
            context = context + done.tokens + tokens_of(7, 50 + turn)
        return turns, counts

    plain = make_engine()
    cached = make_engine(prefix_cache=True)
    (want, all_tokens), (found, few_tokens) = run(work(plain)), run(work(cached))
    equal(found, want)
    assert all_tokens == [40, 59, 78]
    # 40 + 11 cached tokens fill 3 blocks of 16, 59 + 11 fill 4
    assert few_tokens == [40, 59 - 48, 78 - 64]
    assert cached.pool.free == cached.pool.total


def test_a_turn_that_ends_on_a_block_edge_is_remembered_without_its_last_token() -> None:
    """20 + 12 tokens fill two blocks, but the last one was sampled and never fed: its keys and
    values are in no cache.
    """

    async def work(engine: NativeEngine) -> tuple[Completion, int]:
        first = (await engine.generate(tokens_of(20), PARAMS, key=1))[0]
        before = engine.stats.prompt_tokens
        second = (
            await engine.generate(tokens_of(20) + first.tokens + tokens_of(7, 50), PARAMS, key=2)
        )[0]
        return second, engine.stats.prompt_tokens - before

    (want, everything), (found, few) = (
        run(work(make_engine())),
        run(work(make_engine(prefix_cache=True))),
    )
    equal([found], [want])
    assert everything == 39 and few == 39 - 16, "only the first block is known"


def test_blocks_that_are_found_again_are_not_counted_as_free_too() -> None:
    """Six blocks, three of which hold the prompt's known beginning: there is room for three samples
    of one block each, not for four.
    """

    async def work(engine: NativeEngine) -> list[Completion]:
        await engine.generate(tokens_of(48), PARAMS, key=1)
        return await engine.generate([*tokens_of(48), 5], PARAMS, key=2, n=4)

    scarce = make_engine(blocks=6, prefix_cache=True)
    equal(run(work(scarce)), run(work(make_engine())))
    assert scarce.pool.free == scarce.pool.total


def test_a_remembered_prefix_is_dropped_with_the_weights_and_when_room_is_needed() -> None:
    async def work() -> None:
        engine = make_engine(blocks=8, prefix_cache=True)
        await engine.generate(tokens_of(48), PARAMS, key=1)
        assert len(engine.pool.find(block_keys(tokens_of(48), 16))) == 3
        await engine.generate(tokens_of(100, 5), PARAMS, key=2)  # 7 of the 8 blocks
        assert len(engine.pool.find(block_keys(tokens_of(48), 16))) < 3
        await engine.generate(tokens_of(48), PARAMS, key=1)
        await engine.update(Weights("shared", module=engine.model.module), 1)
        assert not engine.pool.find(block_keys(tokens_of(48), 16)) and engine.pool.free == 8

    run(work())


def test_a_key_speaks_about_everything_before() -> None:
    a = block_keys([1] * 32, 16)
    b = block_keys([2] * 16 + [1] * 16, 16)
    assert a[0] != b[0] and a[1] != b[1] and a[0] != a[1] and block_keys([1] * 40, 16) == a
