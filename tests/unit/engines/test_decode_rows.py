"""Several decode steps without a look of the host: rows that are done stand still, the others do
not notice.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.native_engines import break_native
from helpers.toys import VOCABULARY, make_model, make_module, run, tokens_of, true_logprobs
from reinforge.core.engine import Completion, Sampling
from reinforge.core.sample import Stop
from reinforge.core.weights import Weights
from reinforge.engines.native import decoder
from reinforge.engines.native import engine as native
from reinforge.engines.native.blocks import BlockPool, CacheHolding
from reinforge.engines.native.decode_batch import NEVER, DecodeBatch, LiveSequence
from reinforge.engines.native.decoder import LaunchedWindow, bucket
from reinforge.engines.native.drafts import Speculation
from reinforge.engines.native.engine import BLOCK, NativeEngine
from reinforge.models.attention import KVCache
from reinforge.models.state import StateStore

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
        kin=0,
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


def make_engine(
    steps: int = 1,
    ahead: int = 0,
    blocks: int = 256,
    buckets: bool = False,
    graphs: bool = False,
    **settings: Any,
) -> NativeEngine:
    """Windows of so many steps, looked at so many windows late, in batches of fixed sizes: as on a
    GPU. `graphs`: rows live in the tensors of graphs, each of which is a function here.
    """
    engine = NativeEngine(make_model("llama"), **settings)
    engine.blocks = blocks
    engine.pool = BlockPool(blocks, BLOCK)
    engine.decoder.ahead = ahead
    engine.decoder.steps = lambda limit, drafts=0: steps  # type: ignore[method-assign]
    if buckets:
        engine.decoder.size = bucket  # type: ignore[method-assign]
    if graphs:
        captures: Any = engine.decoder
        captures.graphs = True
        captures.parts = lambda rows, steps: 1
        captures._graph = lambda step: SimpleNamespace(replay=step)
    return engine


def settled(engine: NativeEngine) -> bool:
    return engine.pool.free == engine.pool.total and not engine._in_flight and not engine._running


def equal(found: list[Completion], want: list[Completion]) -> None:
    for a, b in zip(found, want, strict=True):
        assert a.tokens == b.tokens and a.stop is b.stop and a.versions == b.versions
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


async def mixture(engine: NativeEngine) -> list[Completion]:
    """Other limits, stop tokens, stop strings, filters and temperatures; some come later."""
    settings = [
        Sampling(40, ignore_eos=True),
        Sampling(1, ignore_eos=True),
        Sampling(60, 0.8),
        Sampling(33, 0.0),
        Sampling(50, 1.3, top_k=5),
        Sampling(60, stop_strings=("ab", "z")),
        Sampling(17, 1.1, top_p=0.7, min_p=0.02, ignore_eos=True),
        Sampling(2, ignore_eos=True),
        Sampling(90, 0.9, ignore_eos=True),
    ]

    async def one(i: int, params: Sampling) -> list[Completion]:
        for _ in range(4 * (i % 3)):
            await asyncio.sleep(0)
        return await engine.generate(tokens_of(3 + 7 * i, i), params, key=i, n=1 + i % 2)

    found = await asyncio.gather(*(one(i, params) for i, params in enumerate(settings)))
    return [c for group in found for c in group]


WINDOWS = [(1, 1), (4, 0), (5, 1), (16, 1), (3, 2)]


@pytest.mark.parametrize("buckets", [False, True], ids=["", "buckets"])
@pytest.mark.parametrize(("steps", "ahead"), WINDOWS)
def test_a_window_that_is_looked_at_late_says_the_same(
    steps: int, ahead: int, buckets: bool
) -> None:
    """What a row samples does not depend on how many steps pass between two looks, on how late the
    host looks, nor on who stands beside it.
    """
    stops = range(0, VOCABULARY, 20)
    want = run(mixture(make_engine(stop_tokens=stops)))
    engine = make_engine(steps, ahead, buckets=buckets, stop_tokens=stops)
    equal(run(mixture(engine)), want)
    assert settled(engine)
    assert {c.stop for c in want} == {Stop.EOS, Stop.LENGTH}


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize(("steps", "blocks"), [(4, 12), (16, 256)])
def test_rows_in_the_tensors_of_graphs_say_the_same(
    steps: int, blocks: int, drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stay there between windows, move on where their number or their width is another, and
    come back to graphs whose tensors others have had since; twice, as steps of training do. Long
    answers come as arrays too.
    """
    monkeypatch.setattr(decoder, "_to_host", torch.Tensor.clone)  # a copy, as from a GPU
    monkeypatch.setattr(native, "LONG", 12)
    stops = range(0, VOCABULARY, 20)
    plain = make_engine(stop_tokens=stops)
    want = [run(mixture(plain)) for _ in range(2)]
    engine = make_engine(
        steps,
        1,
        blocks,
        buckets=True,
        graphs=True,
        stop_tokens=stops,
        speculation=Speculation(drafts, None) if drafts else None,
    )
    for wanted in want:
        found = run(mixture(engine))
        equal(found, wanted)
        assert settled(engine)
        arrays = [c.sampled for c in found]
        assert None in arrays and any(arrays)
        for c in found:
            if c.sampled is not None:
                assert c.sampled.ids.tolist() == c.tokens
                assert c.sampled.logprobs.tolist() == c.logprobs
    assert engine.decoder.captures > 3
    assert (engine.stats.draft_steps > 0) == (drafts > 0)


@pytest.mark.parametrize(
    ("graphs", "drafts", "smaller"), [(False, 0, 16), (False, 3, 16), (True, 0, 16), (True, 3, 8)]
)
def test_when_a_batch_becomes_smaller(graphs: bool, drafts: int, smaller: int) -> None:
    """As soon as a smaller one holds who is left; with drafts on a GPU a quarter must hold them."""
    engine = make_engine(4, 1, buckets=True, graphs=graphs)
    shrinking = [n for n in range(1, 33) if engine.decoder.shrinks(n, 32, drafts)]
    assert shrinking == list(range(1, smaller + 1))


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("blocks", [10, 12, 14])
def test_scarce_blocks_with_windows_in_flight(
    monkeypatch: pytest.MonkeyPatch, blocks: int, prefix_cache: bool
) -> None:
    """Blocks for a window are taken before the one before it was looked at; who is preempted loses
    no token of it. Sequences enter without any care for the next steps, so many are preempted.
    """
    monkeypatch.setattr(native, "AHEAD", 1)
    want = run(mixture(make_engine()))
    engine = make_engine(5, 1, blocks=blocks, buckets=True, prefix_cache=prefix_cache)
    equal(run(mixture(engine)), want)
    assert settled(engine)
    assert engine.stats.preemptions > 0
    assert engine.stats.generated_tokens == sum(len(c.tokens) for c in want)


def test_no_window_is_launched_for_rows_that_are_known_to_end() -> None:
    """12 tokens: one from the prefill, then windows of 5, 5 and 1; a limit is known without a
    look. The stop token of another is seen one window late.
    """

    async def launches(engine: NativeEngine, params: Sampling) -> list[int]:
        seen = []
        plain = engine.decoder.launch

        def launch(
            rows: DecodeBatch, cache: KVCache, steps: int, states: StateStore | None
        ) -> LaunchedWindow:
            seen.append(steps)
            return plain(rows, cache, steps, states)

        engine.decoder.launch = launch  # type: ignore[method-assign]
        await engine.generate(tokens_of(5), params, key=3)
        return seen

    limited = Sampling(12, ignore_eos=True)
    assert run(launches(make_engine(5, 0), limited)) == [5, 5, 1]
    assert run(launches(make_engine(5, 1), limited)) == [5, 5, 1]
    [free] = run(make_engine().generate(tokens_of(5), Sampling(60, ignore_eos=True), key=3))
    stop = next(t for t in free.tokens if 3 <= free.tokens.index(t) <= 5)
    stopping = Sampling(60, stop_tokens=(stop,))
    assert run(launches(make_engine(5, 0), stopping)) == [5]
    assert run(launches(make_engine(5, 1), stopping)) == [5, 5]


def test_tokens_in_flight_belong_to_the_weights_that_drew_them() -> None:
    """An update takes them in first, so they have the old version and none is drawn again."""
    old = make_module("llama", seed=0)
    new = make_module("llama", seed=1)

    async def work() -> tuple[Completion, NativeEngine]:
        engine = make_engine(4, 1)
        task = asyncio.ensure_future(
            engine.generate(tokens_of(20), Sampling(40, ignore_eos=True), key=2)
        )
        while len(engine._sequences()) == 0 or len(engine._sequences()[0].tokens) < 9:
            await asyncio.sleep(0)
        [live] = engine._sequences()
        assert live.ahead == 4 and len(live.tokens) == 9
        with torch.no_grad():
            for p, q in zip(engine.model.module.parameters(), new.parameters(), strict=True):
                p.copy_(q)
        await engine.update(Weights("shared", module=engine.model.module), 5)
        assert len(live.tokens) == 13 and live.ahead == 0
        return (await task)[0], engine

    done, engine = run(work())
    assert done.versions == [0] * 13 + [5] * 27 and settled(engine)
    whole = tokens_of(20) + done.tokens
    exact = torch.cat([true_logprobs(old, whole)[19:32], true_logprobs(new, whole)[32:]])
    assert float((torch.tensor(done.logprobs) - exact).abs().max()) < 1e-5


@pytest.mark.parametrize("pause", [1, 2, 3, 5])
def test_who_is_cancelled_in_flight_disturbs_nobody(pause: int) -> None:
    """Its blocks go to a newcomer at once, while a window that has its row is still in flight."""

    async def work(engine: NativeEngine, cancel: bool) -> list[Completion]:
        stay = asyncio.ensure_future(
            engine.generate(tokens_of(9), Sampling(50, ignore_eos=True), key=1, n=2)
        )
        for _ in range(pause):
            await asyncio.sleep(0)
        if cancel:
            doomed = asyncio.ensure_future(
                engine.generate(tokens_of(30, 5), Sampling(60, ignore_eos=True), key=2)
            )
            for _ in range(pause):
                await asyncio.sleep(0)
            doomed.cancel()
        late = await engine.generate(tokens_of(40, 7), Sampling(20, ignore_eos=True), key=3)
        return await stay + late

    want = run(work(make_engine(), cancel=False))
    engine = make_engine(4, 1, blocks=16, buckets=True)
    equal(run(work(engine, cancel=True)), want)
    assert settled(engine)


def test_a_round_that_breaks_leaves_nothing_in_flight() -> None:
    async def work(engine: NativeEngine) -> None:
        task = asyncio.ensure_future(
            engine.generate(tokens_of(9), Sampling(50, ignore_eos=True), key=1)
        )
        while not engine._in_flight:
            await asyncio.sleep(0)
        repair = break_native(engine)
        with pytest.raises(RuntimeError, match="device lost"):
            await task
        repair()
        assert settled(engine)

    engine = make_engine(4, 1)
    run(work(engine))
    params = Sampling(12, ignore_eos=True)
    equal(
        run(engine.generate(tokens_of(9), params, key=1)),
        run(make_engine().generate(tokens_of(9), params, key=1)),
    )


def test_rows_are_selected_and_joined_with_their_settings() -> None:
    """A row keeps all that it is; where one part is narrower, or has no filters, it gets what
    changes nothing.
    """
    first = DecodeBatch.of(
        [live([1, 2], 4, 1, [0, 3], frozenset({7})), live([1, 2, 3], 9, 2, [1])], DEVICE, spare=9
    )
    filtered = live([4], 5, 3, [4, 5, 6], frozenset({8, 2}))
    filtered.params = Sampling(5, 0.5, top_p=0.25, top_k=3, min_p=0.125)
    second = DecodeBatch.of([filtered], DEVICE, size=2, spare=9)
    assert second.filters is not None
    assert second.filters.tolist() == [[0.25, 3.0, 0.125], [1.0, 0.0, 0.0]]
    rows = DecodeBatch.joined([first.select([1]), second], spare=9)
    assert rows.limits.tolist() == [9, 5, 0] and rows.seeds.tolist() == [2, 3, 0]
    assert rows.cached.tolist() == [3, 1, 0] and rows.done.tolist() == [False, False, True]
    assert rows.tables.tolist() == [[1, 9, 9], [4, 5, 6], [9, 9, 9]]
    assert rows.stops.tolist() == [[NEVER, NEVER], [2, 8], [NEVER, NEVER]]
    assert rows.filters is not None
    assert rows.filters.tolist() == [[1.0, 0.0, 0.0], [0.25, 3.0, 0.125], [1.0, 0.0, 0.0]]
    assert rows.key == (3, 3, 2, True, False, 0, 0, 0)
    assert first.key == (2, 2, 1, False, False, 0, 0, 0)
    rows.extend([(0, 1, 7), (2, 0, 8)])
    assert rows.tables.tolist() == [[1, 7, 9], [4, 5, 6], [8, 9, 9]]
    assert first.tables.tolist() == [[0, 3], [1, 9]], "a selection is a copy"


def test_filtered_greedy_and_filler_rows_draw_as_they_do_alone() -> None:
    model = make_model("llama")
    settings = [
        Sampling(9, 0.0),
        Sampling(9, 1.4, top_k=3),
        Sampling(9, 0.7),
        Sampling(9, 1.0, top_p=0.5, min_p=0.1),
    ]
    sequences = []
    for i, params in enumerate(settings):
        sequence = live([1, 2, 3], 9, 17 + i, [i])
        sequence.params = params
        sequences.append(sequence)
    hidden = torch.randn(6, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        picked, logprobs = DecodeBatch.of(sequences, DEVICE, size=6).draw(model, hidden)
        for i, sequence in enumerate(sequences):
            alone = DecodeBatch.of([sequence], DEVICE).draw(model, hidden[i : i + 1])
            assert int(alone[0]) == int(picked[i])
            assert float(alone[1]) == pytest.approx(float(logprobs[i]), abs=1e-6)
        assert int(picked[0]) == int(model.logits(hidden[:1]).argmax())


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
