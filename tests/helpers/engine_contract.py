"""What every engine must do, whatever generates underneath.

A test module makes a subclass of `EngineContract` with its cases: tests/contract those that need
nothing but torch, tests/scale the others. A new engine is one more case, and every point of the
contract is then asked of it, but for what the case says that it cannot do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

from helpers.toys import VOCABULARY, ToyTokenizer, run, tokens_of
from reinforge.core.engine import Engine, NewTokens, Sampling
from reinforge.core.errors import InputError
from reinforge.core.sample import Stop
from reinforge.core.weights import Weights
from reinforge.engines.resumable import ResumableRequests

FREE = Sampling(12, ignore_eos=True)
PROMPT = tokens_of(7)
LIMIT = 300.0  # seconds for one point: an engine that hangs fails

Middle = Callable[[], Any]  # a coroutine that waits until a request is being answered


@asynccontextmanager
async def by_turns(engine: Any) -> AsyncIterator[Middle]:
    """In the middle of an answer, for an engine of this process: it lets others run between two
    tokens.
    """

    async def middle() -> None:
        for _ in range(12):
            await asyncio.sleep(0)

    yield middle


@dataclass(frozen=True)
class EngineCase:
    """One engine with one setting of it."""

    name: str  # as `rollout.engine` has it, where it has it
    implementation: str  # the name of the class
    make: Callable[..., Any]  # (what was started, stop_tokens=()) -> engine
    weights: Callable[[Any, Any], Weights]  # (what was started, engine) -> what its update takes
    idle: Callable[[Any], bool]  # holds nothing for anybody
    # makes generation fail; what it returns repairs it
    breaks: Callable[[Any], Callable[[], None]] | None = None
    # inside, requests can be met in the middle of their answers
    held: Callable[[Any], AbstractAsyncContextManager[Middle]] = by_turns
    close: Callable[[Any], None] = lambda engine: engine.close()
    patience: float = 0.0  # seconds until it is idle once nobody waits
    vocabulary: int = VOCABULARY
    decode: Callable[[Sequence[int]], str] = ToyTokenizer().decode
    # points of the contract that it does not keep, and why
    cannot: Mapping[str, str] = field(default_factory=dict)

    async def settled(self, engine: Any) -> bool:
        """Whether it holds nothing any more."""
        end = time.monotonic() + self.patience
        while not self.idle(engine) and time.monotonic() < end:
            await asyncio.sleep(0.02)
        return self.idle(engine)


class EngineContract:
    """The points of the contract. `started` is what all cases of a class share: ranks, actors, a
    server.
    """

    cases: ClassVar[Sequence[EngineCase]]
    # of an engine that is not right yet, an answer may never end
    pytestmark = pytest.mark.timeout(120, func_only=True)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        point = metafunc.function.__name__
        found = [pytest.param(c, id=c.name) for c in self.cases if point not in c.cannot]
        if not found:
            first = self.cases[0]
            why = f"{first.name}: {first.cannot[point]}"
            found = [pytest.param(None, id="none", marks=pytest.mark.skip(reason=why))]
        metafunc.parametrize("case", found)

    @pytest.fixture(scope="class")
    def started(self) -> Iterator[Any]:
        yield None

    @pytest.fixture
    def make(self, started: Any, case: EngineCase) -> Iterator[Callable[..., Any]]:
        """Engines of the case; they are closed with the test."""
        made: list[Any] = []

        def build(**settings: Any) -> Any:
            made.append(case.make(started, **settings))
            return made[-1]

        yield build
        for engine in made:
            case.close(engine)

    @pytest.fixture
    def engine(self, make: Callable[..., Any]) -> Any:
        return make()

    def test_is_an_engine(self, engine: Any) -> None:
        assert isinstance(engine, Engine)

    # ---- draws ----

    def test_a_key_fixes_the_draws_whatever_else_runs(
        self, case: EngineCase, make: Callable[..., Any], engine: Any
    ) -> None:
        async def work() -> None:
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
            more = await engine.generate(PROMPT, FREE, key=5, n=8)
            assert [c.tokens for c in more[:3]] == [c.tokens for c in alone]
            fewer = await make().generate(PROMPT, FREE, key=5, n=1)
            assert fewer[0].tokens == alone[0].tokens
            assert await case.settled(engine)

        run(work(), LIMIT)

    def test_samples_and_keys_differ(self, engine: Any) -> None:
        async def work() -> None:
            one, other = await asyncio.gather(
                engine.generate(PROMPT, FREE, key=1, n=6), engine.generate(PROMPT, FREE, key=2, n=6)
            )
            texts = [tuple(c.tokens) for c in one + other]
            assert len(set(texts)) == 12
            assert len({t[0] for t in texts}) > 3  # from the first token on

        run(work(), LIMIT)

    def test_greedy_ignores_the_key(self, engine: Any) -> None:
        async def work() -> None:
            greedy = Sampling(10, 0.0, ignore_eos=True)
            first, second = await engine.generate(PROMPT, greedy, key=1, n=2)
            [third] = await engine.generate(PROMPT, greedy, key=2)
            assert first.tokens == second.tokens == third.tokens
            [other] = await engine.generate(tokens_of(7, 9), greedy, key=1)
            assert first.tokens != other.tokens

        run(work(), LIMIT)

    def test_aligned_and_truncated(self, case: EngineCase, engine: Any) -> None:
        async def work() -> None:
            for limit in (1, 2, 15, 17, 40):
                params = Sampling(limit, 0.7, ignore_eos=True)
                for done in await engine.generate(PROMPT, params, key=3, n=2):
                    assert len(done.tokens) == len(done.logprobs) == len(done.versions) == limit
                    assert done.stop is Stop.LENGTH and set(done.versions) == {0}
                    assert all(-100 < p <= 0 for p in done.logprobs)
                    assert all(0 <= t < case.vocabulary for t in done.tokens)

        run(work(), LIMIT)

    def test_what_streams_tells_tokens_as_they_come(self, engine: Any) -> None:
        """Where it can: pieces that are the completions when they are put together."""
        if engine.streaming is None:
            return
        told: dict[int, list[NewTokens]] = {0: [], 1: []}
        ends = []

        def hear(i: int, new: NewTokens) -> None:
            assert len(new.tokens) == len(new.logprobs) == len(new.versions)
            told[i].append(new)
            if new.done is not None:
                assert new.done.tokens == [t for piece in told[i] for t in piece.tokens]
                ends.append(new.done.stop)

        found = run(engine.streaming.generate(PROMPT, FREE, key=5, n=2, on_tokens=hear), LIMIT)
        for i, completion in enumerate(found):
            for stream in ("tokens", "logprobs", "versions"):
                whole = [value for piece in told[i] for value in getattr(piece, stream)]
                assert whole == getattr(completion, stream)
        assert ends == [Stop.LENGTH] * 2

    def test_what_is_cut_was_told_and_goes_on(self, case: EngineCase, engine: Any) -> None:
        """Where it streams: a request that is cut in the middle of its answer has told tokens of
        it, is heard of no more, and the rest can be asked for.
        """
        if engine.streaming is None:
            return
        params = Sampling(40, ignore_eos=True)
        requests = ResumableRequests(engine.streaming)

        async def work() -> None:
            ask = requests.engine_of("group")
            async with case.held(engine) as middle:
                for key in range(4, 24):  # a fast server may have told all of it at once
                    task = asyncio.ensure_future(ask.generate(PROMPT, params, key=key, n=2))
                    await middle()
                    while not requests.tokens():
                        await asyncio.sleep(0)
                    task.cancel()
                    with suppress(asyncio.CancelledError):
                        await task
                    if task.cancelled():
                        break
                    requests.forget(["group"])
                assert task.cancelled()
                assert await case.settled(engine)
            [request] = requests.copied()["group"].values()
            told = [list(c.tokens) for c in request.completions]
            assert sum(map(len, told)) == requests.tokens()
            whole = await engine.generate(PROMPT, params, key=key, n=2)
            for part, completion in zip(told, whole, strict=True):
                assert part == completion.tokens[: len(part)] and len(part) < 40
            for part, done in zip(
                told, await ask.generate(PROMPT, params, key=key, n=2), strict=True
            ):
                assert done.tokens[: len(part)] == part and done.stop is Stop.LENGTH
                assert len(done.tokens) == len(done.logprobs) == len(done.versions) == 40

        run(work(), LIMIT)

    # ---- stops ----

    @pytest.mark.parametrize("own", [False, True], ids=["asked", "engine's"])
    def test_stop_tokens(
        self, case: EngineCase, make: Callable[..., Any], engine: Any, own: bool
    ) -> None:
        """The stop token is part of the completion; at the very last place it is still a stop, not
        a truncation.
        """

        async def work() -> None:
            [free] = await engine.generate(PROMPT, FREE, key=8)
            for at in (0, 4, 11):
                stop = free.tokens[at]
                first = free.tokens.index(stop)
                asked = make(stop_tokens=[stop]) if own else engine
                params = Sampling(12, stop_tokens=() if own else (stop,))
                [done] = await asked.generate(PROMPT, params, key=8)
                assert done.tokens == free.tokens[: first + 1] and done.stop is Stop.EOS
                assert len(done.logprobs) == len(done.versions) == first + 1
                [unheeded] = await asked.generate(PROMPT, FREE, key=8)
                assert unheeded.tokens == free.tokens and unheeded.stop is Stop.LENGTH
                assert await case.settled(asked)

        run(work(), LIMIT)

    def test_stop_tokens_in_the_prompt_do_not_stop(self, make: Callable[..., Any]) -> None:
        engine = make(stop_tokens=[PROMPT[0], PROMPT[-1]])
        [done] = run(engine.generate(PROMPT, Sampling(3, ignore_eos=True), key=1), LIMIT)
        assert len(done.tokens) == 3

    def test_stop_strings(self, case: EngineCase, engine: Any) -> None:
        async def work() -> None:
            decode = case.decode
            [free] = await engine.generate(PROMPT, FREE, key=8)
            text = decode(free.tokens)
            for string in (text[2:4], text[5:8], text[0]):
                want = next(n for n in range(1, 13) if string in decode(free.tokens[:n]))
                params = Sampling(12, stop_strings=("never", string))
                [done] = await engine.generate(PROMPT, params, key=8)
                assert done.tokens == free.tokens[:want] and done.stop is Stop.EOS
            [never] = await engine.generate(PROMPT, Sampling(12, stop_strings=("zz",)), key=8)
            assert never.tokens == free.tokens and never.stop is Stop.LENGTH

        run(work(), LIMIT)

    # ---- weights ----

    def test_versions_after_an_update(self, case: EngineCase, started: Any, engine: Any) -> None:
        async def work() -> None:
            [before] = await engine.generate(PROMPT, FREE, key=8)
            await engine.update(case.weights(started, engine), 7)
            [after] = await engine.generate(PROMPT, FREE, key=8)
            assert set(before.versions) == {0} and set(after.versions) == {7}
            assert after.tokens == before.tokens
            assert all(isinstance(value, float) for value in engine.measured.values())

        run(work(), LIMIT)

    def test_an_update_in_the_middle_of_a_completion(
        self, case: EngineCase, started: Any, engine: Any
    ) -> None:
        """Every token says which weights sampled it."""

        async def work() -> None:
            params = Sampling(40, ignore_eos=True)
            async with case.held(engine) as middle:
                task = asyncio.ensure_future(engine.generate(PROMPT, params, key=4, n=2))
                for version in (1, 2):
                    await middle()
                    await engine.update(case.weights(started, engine), version)
            for done in await task:
                assert len(done.tokens) == len(done.logprobs) == len(done.versions) == 40
                assert done.versions == sorted(done.versions) and set(done.versions) >= {0, 2}
            assert await case.settled(engine)

        run(work(), LIMIT)

    def test_an_update_to_the_same_values_changes_no_draw(
        self, case: EngineCase, started: Any, engine: Any
    ) -> None:
        async def work() -> None:
            params = Sampling(40, ignore_eos=True)
            want = await engine.generate(PROMPT, params, key=4, n=2)
            async with case.held(engine) as middle:
                task = asyncio.ensure_future(engine.generate(PROMPT, params, key=4, n=2))
                await middle()
                await engine.update(case.weights(started, engine), 1)
            for done, whole in zip(await task, want, strict=True):
                assert done.tokens == whole.tokens
                assert done.logprobs == pytest.approx(whole.logprobs, abs=1e-5)

        run(work(), LIMIT)

    # ---- ends ----

    def test_cancelling_frees_everything_and_disturbs_nobody(
        self, case: EngineCase, engine: Any
    ) -> None:
        async def work() -> None:
            want = await engine.generate(PROMPT, FREE, key=8, n=2)
            for pause in (0, 1, 3, 9):
                long = Sampling(60, ignore_eos=True)
                doomed = asyncio.ensure_future(engine.generate(tokens_of(9, 1), long, key=1, n=4))
                other = asyncio.ensure_future(engine.generate(PROMPT, FREE, key=8, n=2))
                for _ in range(pause):
                    await asyncio.sleep(0)
                doomed.cancel()
                assert [c.tokens for c in await other] == [c.tokens for c in want]
                with pytest.raises(asyncio.CancelledError):
                    await doomed
                await asyncio.sleep(0)
                assert await case.settled(engine)

        run(work(), LIMIT)

    def test_sleeps_until_it_is_asked(self, engine: Any) -> None:
        async def work() -> None:
            [before] = await engine.generate(PROMPT, FREE, key=8)
            await engine.sleep()
            await engine.sleep()
            # wakes by itself
            assert (await engine.generate(PROMPT, FREE, key=8))[0].tokens == before.tokens
            await engine.sleep()
            assert (await engine.generate(PROMPT, FREE, key=8))[0].tokens == before.tokens

        run(work(), LIMIT)

    def test_errors_reach_every_caller_and_nobody_hangs(
        self, case: EngineCase, engine: Any
    ) -> None:
        async def work() -> None:
            want = (await engine.generate(PROMPT, FREE, key=8))[0].tokens
            assert case.breaks is not None
            repair = case.breaks(engine)
            results = await asyncio.gather(
                *(engine.generate(tokens_of(4, i), FREE, key=i, n=3) for i in range(6)),
                return_exceptions=True,
            )
            assert all(isinstance(r, RuntimeError) and "device lost" in str(r) for r in results)
            repair()
            for _ in range(3):
                await asyncio.sleep(0)
            assert await case.settled(engine)
            assert (await engine.generate(PROMPT, FREE, key=8))[0].tokens == want

        run(work(), LIMIT)

    def test_an_empty_prompt_is_an_input_error(self, engine: Any) -> None:
        with pytest.raises(InputError, match="empty prompt"):
            run(engine.generate([], FREE, key=1), LIMIT)

    def test_survives_its_event_loop(self, case: EngineCase, engine: Any) -> None:
        """A notebook calls again and again, each time in a loop of its own, also after one that was
        torn down in the middle.
        """
        want = run(engine.generate(PROMPT, FREE, key=8), LIMIT)[0].tokens

        async def leave() -> None:
            long = Sampling(60, ignore_eos=True)
            task = asyncio.ensure_future(engine.generate(PROMPT, long, key=1, n=2))
            for _ in range(5):
                await asyncio.sleep(0)
            assert not task.done()

        run(leave(), LIMIT)
        assert run(engine.generate(PROMPT, FREE, key=8), LIMIT)[0].tokens == want
        assert run(case.settled(engine), LIMIT)

    def test_its_state_is_for_another_of_its_kind(self, make: Callable[..., Any]) -> None:
        """What it schedules by is a few numbers, and with them another one draws the same."""
        first = make()
        want = run(first.generate(PROMPT, FREE, key=8, n=2), LIMIT)
        state = first.state()
        assert all(type(value) is int for value in state.values())
        second = make()
        second.load(state)
        assert second.state() == state
        before = second.stats.generated_tokens if second.stats is not None else 0
        found = run(second.generate(PROMPT, FREE, key=8, n=2), LIMIT)
        assert [c.tokens for c in found] == [c.tokens for c in want]
        assert second.stats is None or second.stats.generated_tokens - before == 24
