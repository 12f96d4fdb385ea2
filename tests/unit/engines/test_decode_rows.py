"""Several decode steps without a look of the host: rows that are done stand still, the others do
not notice.
"""

from __future__ import annotations

import asyncio

import torch

from helpers.toys import EOS, make_model, run, tokens_of
from reinforge.core.engine import Completion, Sampling
from reinforge.engines.native.blocks import CacheHolding
from reinforge.engines.native.decode_batch import NEVER, DecodeBatch, LiveSequence
from reinforge.engines.native.engine import BLOCK, NativeEngine

DEVICE = torch.device("cpu")


def live(
    prompt: list[int], limit: int, seed: int, blocks: list[int], stops: frozenset[int] = frozenset()
) -> LiveSequence:
    future: asyncio.Future[Completion] = asyncio.new_event_loop().create_future()
    return LiveSequence(
        prompt,
        Sampling(limit, 1.0),
        seed,
        stops,
        future,
        order=0,
        tokens=[5],
        held=CacheHolding(blocks),
    )


def test_rows_stop_by_themselves_and_fillers_never_move() -> None:
    engine = NativeEngine(make_model("llama"), kv_gib=0.001)
    run(engine.wake())
    assert engine.cache is not None
    sequences = [live(tokens_of(3), 4, 1, [0, 1]), live(tokens_of(6), 9, 2, [2, 3])]
    rows = DecodeBatch.of(sequences, DEVICE, size=4, width=3, spare=engine.blocks)
    assert (
        rows.done.tolist() == [False, False, True, True]
        and rows.tables[2].tolist() == [engine.blocks] * 3
    )
    before = engine.cache.keys[0][4 : engine.blocks].clone()
    with torch.no_grad():
        for _ in range(6):
            rows.step(engine.model, engine.cache)
    # 1 + 3 at its limit, 1 + 6 under way, fillers at rest
    assert rows.produced.tolist() == [4, 7, 0, 0]
    assert rows.cached.tolist() == [3 + 3, 6 + 6, 0, 0] and rows.done.tolist() == [
        True,
        False,
        True,
        True,
    ]
    # nobody wrote into blocks that are not theirs
    assert torch.equal(engine.cache.keys[0][4 : engine.blocks], before)
    assert BLOCK * 2 >= 12


def test_a_window_says_the_same_as_single_steps() -> None:
    """What a row samples does not depend on how many steps pass between two looks, nor on who
    stands beside it.
    """
    engine = NativeEngine(make_model("llama"), stop_tokens=[EOS], kv_gib=0.001)
    prompt = tokens_of(5)
    want = run(engine.generate(prompt, Sampling(12, ignore_eos=True), key=3))[0].tokens

    again = NativeEngine(make_model("llama"), stop_tokens=[EOS], kv_gib=0.001)
    plain = again.decoder.run
    calls = []

    def window(rows: DecodeBatch, cache, steps):  # type: ignore[no-untyped-def]
        parts = [plain(rows, cache, 1) for _ in range(steps)]
        calls.append(len(parts))
        first = parts[0]
        for other in parts[1:]:
            for b, (tokens, logprobs) in enumerate(zip(other.tokens, other.logprobs, strict=True)):
                first.tokens[b] += tokens
                first.logprobs[b] += logprobs
                first.counts[b] += other.counts[b]
        return first

    again.decoder.run = window  # type: ignore[method-assign]
    again.decoder.steps = lambda limit: 5  # type: ignore[method-assign]
    got = run(again.generate(prompt, Sampling(12, ignore_eos=True), key=3))[0].tokens
    assert got == want and len(calls) == 3  # 1 from the prefill, then 5 + 5 + 1 of 5


def test_stop_lists_of_different_length_are_padded_with_no_token() -> None:
    rows = DecodeBatch.of(
        [live([1, 2], 4, 1, [0], frozenset({7, 3})), live([1, 2], 4, 1, [1], frozenset())], DEVICE
    )
    assert rows.stops.tolist() == [[3, 7], [NEVER, NEVER]]


def test_who_is_done_stands_among_the_others_and_touches_nothing() -> None:
    """Batches of a fixed size, as graphs have: rows that ended stay until the batch shrinks, while
    siblings read the prompt they shared.
    """

    async def work(engine: NativeEngine) -> list[list[Completion]]:
        limits = (2, 30, 5, 30)
        jobs = [
            engine.generate(tokens_of(20), Sampling(n, ignore_eos=True), key=i)
            for i, n in enumerate(limits)
        ]
        return list(await asyncio.gather(*jobs))

    plain, fixed = (NativeEngine(make_model("llama"), kv_gib=0.001) for _ in range(2))
    fixed.decoder.size = lambda rows: 4  # type: ignore[method-assign]
    for want, found in zip(run(work(plain)), run(work(fixed)), strict=True):
        assert found[0].tokens == want[0].tokens
        assert (
            max(abs(a - b) for a, b in zip(found[0].logprobs, want[0].logprobs, strict=True)) < 1e-5
        )
    assert fixed.pool.free == fixed.pool.total
