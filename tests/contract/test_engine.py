"""What every engine must do, whatever generates underneath.

A new engine is one more case in `CASES`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from helpers.fake_engine import FakeEngine
from helpers.toys import VOCABULARY, ToyTokenizer, make_model, run, tokens_of
from reinforge.core.engine import Engine, Sampling
from reinforge.core.errors import InputError
from reinforge.core.sample import Stop
from reinforge.core.weights import Weights
from reinforge.engines.native import NativeEngine
from reinforge.engines.resumable import ResumableEngine, ResumableRequests
from reinforge.engines.with_opponent import EngineWithOpponent


@dataclass
class Case:
    make: Callable[..., Any]  # (stop_tokens=()) -> engine
    weights: Callable[[Any], Weights]  # what its update takes
    idle: Callable[[Any], bool]  # holds nothing for anybody
    breaks: Callable[[Any], Callable[[], None]]  # makes generation fail; what it returns repairs it


def _break_native(engine: NativeEngine) -> Callable[[], None]:
    model = engine.model
    hidden = engine.model.hidden

    def broken(*args: Any) -> torch.Tensor:
        raise RuntimeError("device lost")

    model.hidden = broken  # type: ignore[method-assign]
    return lambda: setattr(model, "hidden", hidden)


def _break_fake(engine: FakeEngine) -> Callable[[], None]:
    def broken(prompt: Any, index: int) -> list[int]:
        raise RuntimeError("device lost")

    engine.script = broken
    return lambda: setattr(engine, "script", None)


CASES = {
    "native": Case(
        make=lambda **kw: NativeEngine(make_model(), kv_gib=0.01, **kw),
        weights=lambda e: Weights("shared", module=e.model.module),
        idle=lambda e: _native_idle(e),
        breaks=_break_native,
    ),
    # waiting, forks cut in two, and one sequence at a time are its everyday life
    "native_small": Case(
        make=lambda **kw: _with_blocks(NativeEngine(make_model(), max_batch=3, **kw), 8),
        weights=lambda e: Weights("shared", module=e.model.module),
        idle=lambda e: _native_idle(e),
        breaks=_break_native,
    ),
    "paired": Case(
        make=lambda **kw: _paired(**kw),
        weights=lambda e: Weights("shared", module=e.first.model.module),
        idle=lambda e: _native_idle(e.first) and _native_idle(e.second),
        breaks=lambda e: _break_native(e.first),
    ),
    "fake": Case(
        make=lambda **kw: FakeEngine(vocabulary=VOCABULARY, decode=ToyTokenizer().decode, **kw),
        weights=lambda e: Weights("full"),
        idle=lambda e: e.running == 0,
        breaks=_break_fake,
    ),
}


def _paired(**kw: Any) -> EngineWithOpponent:
    """Two that generate with one module, as a policy and its mixture with the reference do."""
    model = make_model()
    return EngineWithOpponent(
        NativeEngine(model, kv_gib=0.01, **kw), NativeEngine(model, kv_gib=0.01, **kw)
    )


def _native_idle(engine: NativeEngine) -> bool:
    return engine.pool.free == engine.pool.total and not engine._running and not engine._waiting


def _with_blocks(engine: NativeEngine, blocks: int) -> NativeEngine:
    from reinforge.engines.native.blocks import BlockPool

    engine.blocks = blocks
    engine.pool = BlockPool(blocks, 16)
    return engine


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


FREE = Sampling(12, ignore_eos=True)
PROMPT = tokens_of(7)


def test_is_an_engine(case: Case) -> None:
    assert isinstance(case.make(), Engine)


def test_a_key_fixes_the_draws_whatever_else_runs(case: Case) -> None:
    async def work() -> None:
        engine = case.make()
        alone = await engine.generate(PROMPT, FREE, key=5, n=3)
        company = [
            engine.generate(
                tokens_of(3 + i, i), Sampling(4 + i, ignore_eos=True), key=i, n=1 + i % 2
            )
            for i in range(5)
        ]
        results = await asyncio.gather(
            *company[:3], engine.generate(PROMPT, FREE, key=5, n=3), *company[3:]
        )
        again = results[3]
        assert [c.tokens for c in again] == [c.tokens for c in alone]
        for a, b in zip(again, alone, strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
        fewer = await case.make().generate(PROMPT, FREE, key=5, n=1)
        more = await engine.generate(PROMPT, FREE, key=5, n=8)
        assert fewer[0].tokens == alone[0].tokens and [c.tokens for c in more[:3]] == [
            c.tokens for c in alone
        ]
        assert case.idle(engine)

    run(work())


def test_samples_and_keys_differ(case: Case) -> None:
    async def work() -> None:
        engine = case.make()
        one, other = await asyncio.gather(
            engine.generate(PROMPT, FREE, key=1, n=6), engine.generate(PROMPT, FREE, key=2, n=6)
        )
        texts = [tuple(c.tokens) for c in one + other]
        assert len(set(texts)) == 12
        assert len({t[0] for t in texts}) > 3  # from the first token on

    run(work())


def test_greedy_ignores_the_key(case: Case) -> None:
    async def work() -> None:
        engine = case.make()
        greedy = Sampling(10, 0.0, ignore_eos=True)
        found = await engine.generate(PROMPT, greedy, key=1, n=2) + await engine.generate(
            PROMPT, greedy, key=2
        )
        assert found[0].tokens == found[1].tokens == found[2].tokens
        assert found[0].tokens != (await engine.generate(tokens_of(7, 9), greedy, key=1))[0].tokens

    run(work())


def test_aligned_and_truncated(case: Case) -> None:
    async def work() -> None:
        engine = case.make()
        for limit in (1, 2, 15, 17, 40):
            for done in await engine.generate(
                PROMPT, Sampling(limit, 0.7, ignore_eos=True), key=3, n=2
            ):
                assert len(done.tokens) == len(done.logprobs) == len(done.versions) == limit
                assert done.stop is Stop.LENGTH and set(done.versions) == {0}
                assert all(-100 < p <= 0 for p in done.logprobs) and all(
                    0 <= t < VOCABULARY for t in done.tokens
                )

    run(work())


@pytest.mark.parametrize("own", [False, True], ids=["asked", "engine's"])
def test_stop_tokens(case: Case, own: bool) -> None:
    """The stop token is part of the completion; at the very last place it is still a stop, not a
    truncation.
    """

    async def work() -> None:
        free = (await case.make().generate(PROMPT, FREE, key=8))[0]
        for at in (0, 4, 11):
            stop = free.tokens[at]
            first = free.tokens.index(stop)
            engine = case.make(stop_tokens=[stop] if own else ())
            params = Sampling(12, stop_tokens=() if own else (stop,))
            done = (await engine.generate(PROMPT, params, key=8))[0]
            assert done.tokens == free.tokens[: first + 1] and done.stop is Stop.EOS
            assert len(done.logprobs) == len(done.versions) == first + 1
            unheeded = (await engine.generate(PROMPT, FREE, key=8))[0]
            assert unheeded.tokens == free.tokens and unheeded.stop is Stop.LENGTH
            assert case.idle(engine)

    run(work())


def test_stop_tokens_in_the_prompt_do_not_stop(case: Case) -> None:
    done = run(
        case.make(stop_tokens=[PROMPT[0], PROMPT[-1]]).generate(
            PROMPT, Sampling(3, ignore_eos=True), key=1
        )
    )[0]
    assert len(done.tokens) == 3


def test_stop_strings(case: Case) -> None:
    async def work() -> None:
        decode = ToyTokenizer().decode
        engine = case.make()
        free = (await engine.generate(PROMPT, FREE, key=8))[0]
        text = decode(free.tokens)
        for string in (text[2:4], text[5:8], text[0]):
            want = next(n for n in range(1, 13) if string in decode(free.tokens[:n]))
            done = (
                await engine.generate(PROMPT, Sampling(12, stop_strings=("never", string)), key=8)
            )[0]
            assert done.tokens == free.tokens[:want] and done.stop is Stop.EOS
        never = (await engine.generate(PROMPT, Sampling(12, stop_strings=("zz",)), key=8))[0]
        assert never.tokens == free.tokens and never.stop is Stop.LENGTH

    run(work())


def test_versions_after_an_update(case: Case) -> None:
    async def work() -> None:
        engine = case.make()
        before = (await engine.generate(PROMPT, FREE, key=8))[0]
        await engine.update(case.weights(engine), 7)
        after = (await engine.generate(PROMPT, FREE, key=8))[0]
        assert (
            set(before.versions) == {0}
            and set(after.versions) == {7}
            and after.tokens == before.tokens
        )

    run(work())


def test_an_update_in_the_middle_of_a_completion(case: Case) -> None:
    """Every token says which weights sampled it; with unchanged values the completion itself is
    unchanged.
    """

    async def work() -> None:
        engine = case.make()
        params = Sampling(40, ignore_eos=True)
        want = await engine.generate(PROMPT, params, key=4, n=2)
        task = asyncio.ensure_future(engine.generate(PROMPT, params, key=4, n=2))
        for version in (1, 2):
            for _ in range(12):
                await asyncio.sleep(0)
            await engine.update(case.weights(engine), version)
        for done, whole in zip(await task, want, strict=True):
            assert done.tokens == whole.tokens and done.logprobs == pytest.approx(
                whole.logprobs, abs=1e-5
            )
            assert done.versions == sorted(done.versions) and set(done.versions) >= {0, 2}
        assert case.idle(engine)

    run(work())


def test_cancelling_frees_everything_and_disturbs_nobody(case: Case) -> None:
    async def work() -> None:
        engine = case.make()
        want = await engine.generate(PROMPT, FREE, key=8, n=2)
        for pause in (0, 1, 3, 9):
            doomed = asyncio.ensure_future(
                engine.generate(tokens_of(9, 1), Sampling(60, ignore_eos=True), key=1, n=4)
            )
            other = asyncio.ensure_future(engine.generate(PROMPT, FREE, key=8, n=2))
            for _ in range(pause):
                await asyncio.sleep(0)
            doomed.cancel()
            assert [c.tokens for c in await other] == [c.tokens for c in want]
            with pytest.raises(asyncio.CancelledError):
                await doomed
            await asyncio.sleep(0)
            assert case.idle(engine)

    run(work())


def test_sleeps_until_it_is_asked(case: Case) -> None:
    async def work() -> None:
        engine = case.make()
        before = (await engine.generate(PROMPT, FREE, key=8))[0]
        await engine.sleep()
        await engine.sleep()
        # wakes by itself
        assert (await engine.generate(PROMPT, FREE, key=8))[0].tokens == before.tokens
        await engine.sleep()
        assert (await engine.generate(PROMPT, FREE, key=8))[0].tokens == before.tokens

    run(work())


def test_errors_reach_every_caller_and_nobody_hangs(case: Case) -> None:
    async def work() -> None:
        engine = case.make()
        want = (await engine.generate(PROMPT, FREE, key=8))[0].tokens
        repair = case.breaks(engine)
        results = await asyncio.gather(
            *(engine.generate(tokens_of(4, i), FREE, key=i, n=3) for i in range(6)),
            return_exceptions=True,
        )
        assert all(isinstance(r, RuntimeError) and "device lost" in str(r) for r in results)
        repair()
        for _ in range(3):
            await asyncio.sleep(0)
        assert case.idle(engine)
        assert (await engine.generate(PROMPT, FREE, key=8))[0].tokens == want

    run(work())


def test_an_empty_prompt_is_an_input_error(case: Case) -> None:
    with pytest.raises(InputError, match="empty prompt"):
        run(case.make().generate([], FREE, key=1))


def test_survives_its_event_loop(case: Case) -> None:
    """A notebook calls again and again, each time in a loop of its own, also after one that was
    torn down in the middle.
    """
    engine = case.make()
    want = run(engine.generate(PROMPT, FREE, key=8))[0].tokens

    async def leave() -> None:
        task = asyncio.ensure_future(
            engine.generate(PROMPT, Sampling(60, ignore_eos=True), key=1, n=2)
        )
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done()

    run(leave())
    assert run(engine.generate(PROMPT, FREE, key=8))[0].tokens == want and case.idle(engine)


def test_the_engine_of_a_group_draws_what_the_inner_one_draws() -> None:
    """A resumable engine answers a key once, so the suite above, which asks again with other
    settings, is not for it.
    """
    inner = NativeEngine(make_model(), kv_gib=0.01)
    engine: ResumableEngine = ResumableRequests(inner).engine_of("group")
    assert isinstance(engine, Engine)

    async def work() -> None:
        want = await inner.generate(PROMPT, FREE, key=8, n=2)
        assert await engine.generate(PROMPT, FREE, key=8, n=2) == want

    run(work())
    assert _native_idle(inner)
