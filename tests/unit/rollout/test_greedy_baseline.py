"""The greedy rollout of remax: one more completion per prompt, scored like the others, counted,
never trained.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from helpers.fake_engine import FakeEngine
from helpers.group_source import take_batch
from helpers.toys import EOS, ToyTokenizer, make_model, run, tokens_of
from reinforge.algorithms.parts.advantages import AdvantageOptions, Rollouts, greedy_baseline
from reinforge.core.batch import Batch
from reinforge.core.engine import Sampling
from reinforge.core.env import RolloutContext
from reinforge.core.errors import InputError
from reinforge.core.sample import Row
from reinforge.core.seeds import seed_of
from reinforge.data.cursor import Cursor
from reinforge.engines.native import NativeEngine
from reinforge.rewards.function import FunctionReward
from reinforge.rollout.journal import Journal
from reinforge.rollout.players.single_turn import SingleTurn
from reinforge.rollout.source import GroupSource, RolloutBatch, rollout_metrics

ROW = Row("r7", "prompt")
PROMPT = tokens_of(5)
decode = ToyTokenizer().decode


def codes(completions: list[str]) -> list[float]:
    return [float(sum(map(ord, c)) % 97) for c in completions]


def rollout(
    engine: Any = None,
    reward: Any = codes,
    *,
    n: int = 3,
    limit: int = 6,
    greedy: bool = True,
    **kw: Any,
) -> SingleTurn:
    return SingleTurn(
        engine or FakeEngine(decode=decode, stop_tokens=[EOS]),
        lambda row: list(PROMPT),
        decode,
        [FunctionReward("mine", reward, kw.pop("weight", 1.0))],
        Sampling(limit),
        n=n,
        seed=0,
        greedy_baseline=greedy,
        **kw,
    )


@pytest.mark.parametrize("kind", ["fake", "native"])
def test_the_baseline_is_the_reward_of_the_greedy_completion(kind: str) -> None:
    """The samples are those that are drawn without a baseline, and the books say how many tokens
    the baseline took.
    """
    engine: Any = (
        FakeEngine(decode=decode) if kind == "fake" else NativeEngine(make_model(), kv_gib=0.01)
    )
    # greedy: the key does not matter
    [best] = run(engine.generate(PROMPT, Sampling(6, temperature=0.0), key=12345, n=1))
    group, plain = (
        run(
            rollout(engine, greedy=greedy, weight=2.0, shape=lambda n: -n / 10)(
                ROW, RolloutContext("0:r7")
            )
        )
        for greedy in (True, False)
    )
    want = 2 * codes([decode(best.tokens)])[0] - len(best.tokens) / 10
    assert [s.baseline for s in group.samples] == [pytest.approx(want)] * 3 and [
        s.baseline for s in plain.samples
    ] == [None] * 3
    assert [s.tokens.tolist() for s in group.samples] == [
        s.tokens.tolist() for s in plain.samples
    ] and group.texts == plain.texts
    assert [s.reward for s in group.samples] == [s.reward for s in plain.samples]
    assert group.extra_tokens == len(best.tokens) > 0 and plain.extra_tokens == 0
    assert greedy_baseline(
        Rollouts.of([Batch.pack(group.samples)]), AdvantageOptions()
    ).tolist() == pytest.approx(
        [s.reward - want for s in group.samples for _ in range(s.n_trained)]  # type: ignore[operator]
    )


def test_it_is_asked_for_as_the_samples_are_and_greedily() -> None:
    engine = FakeEngine(decode=decode)
    run(rollout(engine)(ROW, RolloutContext("g")))
    assert engine.requests == [
        (PROMPT, Sampling(6), seed_of(0, "sample", "g"), 3),
        (PROMPT, Sampling(6, 0.0), seed_of(0, "baseline", "g"), 1),
    ]


def test_books_balance() -> None:
    source = GroupSource([Row(f"r{i}", "p") for i in range(4)], Cursor(4, 0, False), rollout(), 2)
    batch = run(take_batch(source))
    trained = sum(s.n_trained for g in batch.groups for s in g.samples)
    assert (
        batch.sampled_tokens
        == trained + sum(g.extra_tokens for g in batch.groups)
        == rollout_metrics(batch, {})["tokens/sampled"]
    )
    assert batch.sampled_tokens > trained and isinstance(batch, RolloutBatch)


def test_scores_are_journalled_apart_from_those_of_the_samples(tmp_path: Path) -> None:
    """One scripted text for all: only the name tells the greedy completion from the sample.

    A redone step asks nobody again.
    """
    calls: list[int] = []

    def moody(completions: list[str]) -> list[float]:
        calls.append(len(completions))
        return [float(len(calls))] * len(completions)

    def once() -> tuple[float | None, float | None]:
        engine = FakeEngine(lambda prompt, i: [9, EOS], stop_tokens=[EOS], decode=decode)
        sample = run(
            rollout(engine, moody, n=1, journal=Journal(tmp_path / "j"))(ROW, RolloutContext("g"))
        ).samples[0]
        return sample.reward, sample.baseline

    first = once()
    assert sorted(first) == [1.0, 2.0] and once() == first and calls == [1, 1]  # type: ignore[type-var]


def test_an_unscored_greedy_completion_gives_no_baseline() -> None:
    def only_samples(completions: list[str]) -> list[float | None]:
        return [None] if len(completions) == 1 else [1.0] * len(completions)

    assert [
        s.baseline for s in run(rollout(reward=only_samples)(ROW, RolloutContext("g"))).samples
    ] == [None] * 3


@pytest.mark.parametrize("fails", [1, 3])
def test_a_failure_or_a_cut_leaves_nothing_running(fails: int) -> None:
    """The reward fails on the greedy completion (1 text) or on the samples (3), while the other is
    still being written.
    """
    lengths = {1: 2, 3: 60} if fails == 1 else {1: 60, 3: 2}
    engine = FakeEngine(decode=decode)
    original = engine.generate

    async def uneven(tokens: Any, params: Sampling, *, key: int, n: int = 1) -> Any:
        return await original(tokens, Sampling(lengths[n], params.temperature), key=key, n=n)

    engine.generate = uneven  # type: ignore[method-assign]

    def boom(completions: list[str]) -> list[float]:
        if len(completions) == fails:
            raise ZeroDivisionError("oh")
        return [0.0] * len(completions)

    with pytest.raises(InputError, match="reward mine raised at .*: ZeroDivisionError: oh"):
        run(rollout(engine, boom)(ROW, RolloutContext("g")))
    assert engine.running == 0

    async def cut() -> None:
        task = asyncio.ensure_future(rollout(engine)(ROW, RolloutContext("g")))
        while engine.running < 4:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.running == 0

    lengths = {1: 60, 3: 60}
    run(cut())
