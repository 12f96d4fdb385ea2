"""A cache that runs out: sequences take blocks as they grow, the youngest gives way, and nobody can
tell from the answers.
"""

from __future__ import annotations

import asyncio

import pytest
import torch

from helpers.toys import VOCABULARY, make_model, make_module, run, tokens_of, true_logprobs
from reinforge.core.engine import Completion, Sampling
from reinforge.core.weights import Weights
from reinforge.engines.native import NativeEngine
from reinforge.engines.native import engine as native
from reinforge.engines.native.blocks import BlockPool, CacheHolding
from reinforge.engines.native.decode_batch import LiveSequence
from reinforge.engines.native.prefill import SharedPrefix, admit
from reinforge.models.causal import CausalModel

LONG = Sampling(70, 0.9, ignore_eos=True)


def make_engine(
    model: CausalModel | None = None, blocks: int = 256, **settings: bool
) -> NativeEngine:
    engine = NativeEngine(model or make_model(), **settings)
    engine.blocks = blocks
    engine.pool = BlockPool(blocks, native.BLOCK)
    return engine


async def groups(engine: NativeEngine, seed: int = 0, n: int = 2) -> list[Completion]:
    """Prompts of one, two and three blocks, whose answers end in the fifth, sixth and eighth."""
    jobs = [
        engine.generate(tokens_of(length, seed + i), LONG, key=seed + i, n=n)
        for i, length in enumerate((5, 20, 45))
    ]
    return [c for group in await asyncio.gather(*jobs) for c in group]


def drained(engine: NativeEngine) -> bool:
    return engine.pool.free == engine.pool.total and not engine._running and not engine._waiting


@pytest.mark.parametrize("seed", [0, 10, pytest.param(20, marks=pytest.mark.long)])
def test_exact_mode_has_the_same_bits_with_and_without_preemption(seed: int) -> None:
    def model() -> CausalModel:
        return CausalModel(make_module(), exact=True)

    scarce = make_engine(model(), blocks=13)
    found = run(groups(scarce, seed, n=1))
    want = run(groups(make_engine(model()), seed, n=1))
    assert scarce.stats.preemptions > 0 and drained(scarce)
    assert [c.tokens for c in found] == [c.tokens for c in want]
    assert [c.logprobs for c in found] == [c.logprobs for c in want]


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("blocks", [8, 12, 18, 25])
def test_preemption_changes_no_token(blocks: int, prefix_cache: bool) -> None:
    scarce = make_engine(blocks=blocks, prefix_cache=prefix_cache)
    for a, b in zip(run(groups(scarce)), run(groups(make_engine())), strict=True):
        assert a.tokens == b.tokens and a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
        assert a.versions == [0] * 70
    assert scarce.stats.preemptions > 0 and drained(scarce)
    assert scarce.stats.generated_tokens == 6 * 70, "no token is drawn twice"


def test_rounds_repeat_themselves() -> None:
    """The same requests, the same rounds: who is preempted is not a matter of chance."""

    async def work(engine: NativeEngine) -> list[list[int]]:
        seen: list[list[int]] = []
        plain = engine._round

        def watched() -> None:
            plain()
            seen.append([s.order for s in engine._live()])

        engine._round = watched  # type: ignore[method-assign]
        await groups(engine)
        return seen

    first, second = (run(work(make_engine(blocks=18))) for _ in range(2))
    assert first == second
    assert all(live == sorted(live) for live in first)
    # whoever is in came before whoever waits
    assert all(live == list(range(live[0], live[0] + len(live))) for live in first if live)


def test_what_fits_by_need_runs_at_once_though_the_limits_do_not_fit() -> None:
    """32 answers of some 20 tokens under a limit of 512: 33 blocks each if they were reserved, 3
    each for the next steps, and 100 there are.
    """
    engine = NativeEngine(make_model(), stop_tokens=range(0, VOCABULARY, 20))
    engine.blocks = 100
    engine.pool = BlockPool(100, native.BLOCK)
    most = 0

    async def work() -> list[Completion]:
        nonlocal most
        task = asyncio.ensure_future(engine.generate(tokens_of(5), Sampling(512), key=1, n=32))
        while not task.done():
            await asyncio.sleep(0)
            most = max(most, len(engine._decoding()))
        return await task

    found = run(work())
    longest = max(len(c.tokens) for c in found)
    assert most >= 28 and engine.stats.prompt_tokens == 5
    assert engine.stats.preemptions == 0 and engine.stats.steps < longest + 3
    assert drained(engine)


def test_the_youngest_gives_way_and_comes_back_first() -> None:
    """Two sequences of 8 blocks each in a pool of 12: the second one leaves when the blocks end, a
    third has to wait behind it.
    """

    async def work(engine: NativeEngine) -> list[int]:
        ended: list[int] = []

        async def one(i: int) -> None:
            await engine.generate(tokens_of(40, i), Sampling(80, ignore_eos=True), key=i)
            ended.append(i)

        await asyncio.gather(*(one(i) for i in range(3)))
        return ended

    engine = make_engine(blocks=12)
    assert run(work(engine)) == [0, 1, 2]
    assert engine.stats.preemptions > 0
    # three prompts, and what was computed again
    assert engine.stats.prompt_tokens > 3 * 40 + 40


def test_who_comes_back_finds_what_nobody_took() -> None:
    """With the prefix cache a preempted sequence computes only what others have taken over."""
    plain = make_engine(blocks=18)
    cached = make_engine(blocks=18, prefix_cache=True)
    run(groups(plain))
    run(groups(cached))
    assert plain.stats.preemptions == cached.stats.preemptions > 0
    assert cached.stats.prompt_tokens < plain.stats.prompt_tokens


def test_an_update_while_some_wait_for_blocks() -> None:
    """Everybody is prefilled again in the order of arrival, and every token has the log-prob of the
    weights that drew it.
    """
    old = make_module(seed=0)
    new = make_module(seed=1)

    async def work() -> tuple[list[Completion], NativeEngine]:
        model = make_model(seed=0)
        engine = make_engine(model, blocks=18)
        task = asyncio.ensure_future(groups(engine))
        while not engine.stats.preemptions:
            await asyncio.sleep(0)
        with torch.no_grad():
            for p, q in zip(model.module.parameters(), new.parameters(), strict=True):
                p.copy_(q)
        await engine.update(Weights("shared", module=model.module), 3)
        assert [s.order for fork in engine._waiting for s in fork.sequences] == list(range(6))
        assert engine.pool.free == engine.pool.total
        return await task, engine

    found, engine = run(work())
    assert drained(engine)
    prompts = [tokens_of(length, i) for i, length in enumerate((5, 20, 45)) for _ in range(2)]
    mixed = 0
    for prompt, done in zip(prompts, found, strict=True):
        n = done.versions.count(0)
        assert done.versions == [0] * n + [3] * (70 - n)
        mixed += 0 < n < 70
        whole = prompt + done.tokens
        exact = torch.cat(
            [
                true_logprobs(old, whole, 0.9)[len(prompt) - 1 :][:n],
                true_logprobs(new, whole, 0.9)[len(prompt) - 1 :][n:],
            ]
        )
        assert float((torch.tensor(done.logprobs) - exact).abs().max()) < 1e-5
    assert mixed >= 4


def test_a_prompt_on_its_way_in_gives_way_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt comes in by pieces of a block while the older ones grow into the blocks that
    were free when it was admitted.
    """
    monkeypatch.setattr(native, "PREFILL_TOKENS", 16)

    async def work(engine: NativeEngine) -> list[Completion]:
        first = asyncio.ensure_future(engine.generate(tokens_of(5), LONG, key=1, n=3))
        while len(engine._decoding()) < 3:
            await asyncio.sleep(0)
        second = await engine.generate(tokens_of(300, 2), Sampling(5, ignore_eos=True), key=2)
        return await first + second

    plenty = make_engine()
    scarce = make_engine(blocks=30)
    for a, b in zip(run(work(scarce)), run(work(plenty)), strict=True):
        assert a.tokens == b.tokens and a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
    assert drained(scarce)


@pytest.mark.parametrize(("reserved", "fits"), [(0, 2), (1, 2), (2, 1), (4, 1), (5, 0)])
def test_who_enters_leaves_room_for_the_next_steps_of_all(reserved: int, fits: int) -> None:
    """A prompt of a block and a quarter, 32 steps ahead: 3 blocks more for each, of 8. Those who
    are in need `reserved`.
    """
    future: asyncio.Future[Completion] = asyncio.new_event_loop().create_future()
    prompt = tokens_of(20)
    sequences = [
        LiveSequence(prompt, Sampling(60), i, frozenset(), future, order=i, kin=0) for i in range(3)
    ]
    fork = SharedPrefix(prompt, list(sequences))
    pool = BlockPool(8, 16)
    admitted = admit(fork, pool, 3, ahead=32, reserved=reserved)
    assert fork.sequences == sequences[fits:]
    if admitted is None:
        assert fits == 0 and pool.free == 8
        return
    assert admitted.sequences == sequences[:fits]
    assert pool.free == 8 - 1 - fits, "they took the blocks of their tokens only"


def test_a_holding_grows_by_need_and_is_given_back_as_a_whole() -> None:
    pool = BlockPool(6, 16)
    one = CacheHolding()
    other = CacheHolding()
    assert one.missing(pool, 33) == 3
    assert len(one.grow(pool, 33)) == 3 and one.grow(pool, 48) == []
    other.share(pool, one.blocks[:2])
    assert other.missing(pool, 40) == 1
    [own] = other.grow(pool, 40)
    assert other.blocks == [*one.blocks[:2], own] and pool.free == 2
    one.give_back(pool)
    assert one.blocks == [] and pool.free == 3
    other.give_back(pool)
    assert pool.free == 6
