"""From rows to samples: the ids that were sampled are the ids that are trained, and nothing
unscored becomes a zero.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.fake_engine import FakeEngine
from helpers.group_source import take_batch
from helpers.toys import EOS, ToyTokenizer, make_model, run, tokens_of
from reinforge.core.engine import Sampling
from reinforge.core.env import RolloutContext
from reinforge.core.errors import InputError
from reinforge.core.sample import Group, Row, Sample, Stop
from reinforge.core.seeds import answers_hash, tokens_hash
from reinforge.data.cursor import Cursor
from reinforge.engines.native import NativeEngine
from reinforge.loops.rl import trainable
from reinforge.rewards.function import FunctionReward
from reinforge.rollout.journal import Journal
from reinforge.rollout.players.single_turn import LONG, SingleTurn
from reinforge.rollout.source import GroupSource, RolloutBatch, has_signal, rollout_metrics

ROW = Row("r7", "prompt", {"answer": "x"})
PROMPT = tokens_of(5)
decode = ToyTokenizer().decode


def length_reward(completions: list[str]) -> list[float]:
    return [float(len(c)) for c in completions]


def make_rollout(
    engine: Any = None,
    reward: Callable[..., Any] = length_reward,
    *,
    n: int = 4,
    limit: int = 6,
    **kw: Any,
) -> SingleTurn:
    rewards = [FunctionReward("mine", reward)] if callable(reward) else reward
    return SingleTurn(
        engine or FakeEngine(decode=decode, stop_tokens=[EOS]),
        lambda row: list(PROMPT),
        decode,
        rewards,
        Sampling(limit),
        n=n,
        seed=0,
        **kw,
    )


# single turn


@pytest.mark.parametrize("kind", ["fake", "native"])
def test_trained_ids_are_the_sampled_ids(kind: str) -> None:
    """Eight ids decode to each letter: no text could give them back, and nothing asks
    it to.
    """
    engine: Any = (
        FakeEngine(decode=decode) if kind == "fake" else NativeEngine(make_model(), kv_gib=0.01)
    )
    given: list[Any] = []
    original = engine.generate

    async def watched(*args: Any, **kwargs: Any) -> Any:
        given.append((list(args[0]), await original(*args, **kwargs)))
        return given[-1][1]

    engine.generate = watched
    group = run(make_rollout(engine, n=4, limit=9)(ROW, RolloutContext("0:r7")))
    prompt, completions = given[0]
    assert prompt == PROMPT
    for i, (sample, done) in enumerate(zip(group.samples, completions, strict=True)):
        assert sample.tokens.tolist() == PROMPT + done.tokens and sample.trained.tolist() == [
            False
        ] * 5 + [True] * len(done.tokens)
        assert (
            sample.logprobs.tolist() == pytest.approx([0.0] * 5 + done.logprobs)
            and sample.versions.tolist() == [-1] * 5 + done.versions
        )
        assert (sample.uid, sample.group, sample.episode) == (f"0:r7#{i}", "0:r7", f"0:r7#{i}")
        assert (
            group.texts[i] == decode(done.tokens)
            and sample.reward == len(group.texts[i])
            and sample.rewards == {"mine": sample.reward}
        )
    assert (
        len({s.uid for s in group.samples}) == 4
        and sample.tokens.dtype is torch.int64
        and sample.logprobs.dtype is torch.float32
    )


def test_texts_of_long_groups_are_made_in_a_thread_and_in_order() -> None:
    """The same groups, done in the order in which they were generated, though the texts of the
    first take longest.
    """
    plain = make_rollout(n=4, limit=6)
    names = [f"{i}:r7" for i in range(5)]
    want = [run(plain(ROW, RolloutContext(name))) for name in names]
    threads: list[str] = []
    sizes: list[int] = []
    slow = True

    def decode_all(answers: Sequence[Sequence[int]]) -> list[str]:
        nonlocal slow
        threads.append(threading.current_thread().name)
        sizes.append(len(answers))
        if slow:
            slow = False
            time.sleep(0.05)
        return [decode(tokens) for tokens in answers]

    long = make_rollout(n=4, limit=LONG // 4, decode_all=decode_all)
    long.sampling = plain.sampling  # it may be long, and is not
    done: list[str] = []

    async def one(name: str) -> Group:
        group = await long(ROW, RolloutContext(name))
        done.append(name)
        return group

    async def all_of_them() -> list[Group]:
        return await asyncio.gather(*map(one, names))

    found = run(all_of_them())
    # those that came while the first were made were made together, each by one call
    assert done == names and set(threads) == {"texts"} and sum(sizes) == 20
    assert 1 <= len(sizes) < 5 and all(size % 4 == 0 for size in sizes)
    for ours, theirs in zip(found, want, strict=True):
        assert ours.texts == theirs.texts
        assert [s.tokens.tolist() for s in ours.samples] == [
            s.tokens.tolist() for s in theirs.samples
        ]
        assert [s.reward for s in ours.samples] == [s.reward for s in theirs.samples]
    threads.clear()
    run(make_rollout(n=4, limit=LONG // 4 - 1, decode_all=decode_all)(ROW, RolloutContext("0:r7")))
    assert threads == ["MainThread"]


def test_draws_depend_on_run_group_and_purpose_only() -> None:
    """The same group again gives the same samples; another seed, group or purpose gives others."""
    texts = lambda rollout, group: run(rollout(ROW, RolloutContext(group))).texts  # noqa: E731
    want = texts(make_rollout(), "0:r7")
    assert texts(make_rollout(), "0:r7") == want
    other = make_rollout()
    other.seed = 1
    assert want not in (
        texts(other, "0:r7"),
        texts(make_rollout(), "1:r7"),
        texts(make_rollout(purpose="eval"), "0:r7"),
    )


def test_finished_or_truncated_is_what_the_engine_says() -> None:
    """EOS sampled at the last allowed place is finished; EOS inside, as pad, or no EOS at all is
    not what decides.
    """
    scripts = {0: [9, EOS], 1: [9, 9, 9, EOS], 2: [9, 9, 9, 9], 3: [EOS]}
    engine = FakeEngine(lambda prompt, i: scripts[i], stop_tokens=[EOS], decode=decode)
    group = run(make_rollout(engine, limit=4)(ROW, RolloutContext("g")))
    assert [s.stop for s in group.samples] == [Stop.EOS, Stop.EOS, Stop.LENGTH, Stop.EOS]
    assert [s.n_trained for s in group.samples] == [2, 4, 4, 1]  # the EOS is trained
    ignoring = make_rollout(FakeEngine(lambda prompt, i: [9, EOS, 9, EOS], decode=decode), limit=4)
    # ends in eos by accident, and is still cut
    assert [s.stop for s in run(ignoring(ROW, RolloutContext("g"))).samples] == [Stop.LENGTH] * 4
    metrics = rollout_metrics(RolloutBatch([group]), {"mine": 1.0})
    assert (
        metrics["response/truncated"] == 0.25
        and metrics["response/length"] == 11 / 4
        and metrics["response/max_length"] == 4
    )


def test_shape_is_added_to_what_is_scored_only() -> None:
    rollout = make_rollout(
        FakeEngine(decode=decode),
        lambda completions: [1.0, None, 1.0, 1.0],
        shape=lambda n: -n / 10,
    )
    samples = run(rollout(ROW, RolloutContext("g"))).samples
    assert [s.reward for s in samples] == [
        pytest.approx(0.4),
        None,
        pytest.approx(0.4),
        pytest.approx(0.4),
    ]
    assert samples[0].rewards == {"mine": 1.0, "overlong": -0.6} and samples[1].rewards == {
        "mine": None
    }


def test_weights_and_components() -> None:
    rewards = [
        FunctionReward("a", lambda completions: [1.0, 0.0], 2.0),
        FunctionReward("b", lambda completions: [1.0, None], -0.5),
    ]
    samples = run(make_rollout(reward=rewards, n=2)(ROW, RolloutContext("g"))).samples  # type: ignore[arg-type]
    assert [s.rewards for s in samples] == [{"a": 1.0, "b": 1.0}, {"a": 0.0, "b": None}] and [
        s.reward for s in samples
    ] == [1.5, 0.0]


def boom(completions: list[str]) -> list[float]:
    raise ZeroDivisionError("oh")


FAULTS: dict[str, Callable[..., Any]] = {
    "raises": boom,
    "wrong count": lambda completions: [1.0],
    "nan": lambda completions: [float("nan")] * 4,
    "text": lambda completions: ["1"] * 4,
    "none at all": lambda completions: None,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_reward_that_fails(fault: str) -> None:
    """Stops with the row's name, or leaves the samples unscored: not 0, not trained, counted."""
    with pytest.raises(InputError, match=r"reward mine"):
        run(make_rollout(reward=FAULTS[fault])(ROW, RolloutContext("g")))
    rollout = make_rollout(reward=FAULTS[fault], on_error="unscored")
    group = run(rollout(ROW, RolloutContext("g")))
    assert [s.reward for s in group.samples] == [None] * 4 and [
        s.rewards for s in group.samples
    ] == [{"mine": None}] * 4
    assert len(rollout.errors) == 1 and "r7" in rollout.errors[0]
    assert [trainable(s, "keep").n_trained for s in group.samples] == [0] * 4 and not has_signal(
        group
    )
    metrics = rollout_metrics(RolloutBatch([group]), {"mine": 1.0})
    assert (
        metrics["reward/unscored"] == 1.0
        and metrics["reward/mean"] != metrics["reward/mean"]
        and "reward/mine" not in metrics
    )


def test_a_raised_error_names_the_row_and_the_cause() -> None:
    with pytest.raises(
        InputError,
        match=(
            r"row r7: reward mine raised at .*test_rollout.py:\d+ in boom: ZeroDivisionError: oh"
            r" \(the line: raise ZeroDivisionError\(.*The run ends here.*on_reward_error"
        ),
    ) as caught:
        run(make_rollout(reward=boom)(ROW, RolloutContext("g")))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_trainable() -> None:
    sample = Sample.from_tokens("u", [1, 2, 3], [False, True, True], reward=0.0)
    assert trainable(sample, "mask").n_trained == 2  # a reward of 0 is a reward
    assert trainable(sample.with_(reward=None), "keep").n_trained == 0
    assert trainable(sample.with_(stop=Stop.ERROR), "keep").n_trained == 0
    cut = sample.with_(stop=Stop.LENGTH)
    assert (
        trainable(cut, "keep").n_trained == 2
        and trainable(cut, "mask").n_trained == 0
        and trainable(cut, "mask").reward == 0.0
    )


def test_an_empty_completion_is_never_trained() -> None:
    class Silent(FakeEngine):
        async def generate(
            self, tokens: Sequence[int], params: Sampling, *, key: int, n: int = 1
        ) -> Any:
            from reinforge.core.engine import Completion

            return [Completion([], [], [], Stop.LENGTH)] * n

    sample = run(make_rollout(Silent())(ROW, RolloutContext("g"))).samples[0]
    assert sample.stop is Stop.ERROR and sample.n_trained == 0


# the journal


def test_a_redone_step_uses_the_recorded_scores(tmp_path: Path) -> None:
    calls: list[int] = []

    def moody(completions: list[str]) -> list[float | None]:
        calls.append(len(calls))
        return [float(len(calls)), None, 0.1, 0.2]

    path = tmp_path / "journal.jsonl"
    first = run(make_rollout(reward=moody, journal=Journal(path))(ROW, RolloutContext("g")))
    again = run(
        make_rollout(reward=moody, journal=Journal(path))(ROW, RolloutContext("g"))
    )  # another process
    assert [s.reward for s in first.samples] == [s.reward for s in again.samples] == [
        1.0,
        None,
        0.1,
        0.2,
    ] and len(calls) == 1
    # another group was never asked about
    other = run(make_rollout(reward=moody, journal=Journal(path))(ROW, RolloutContext("h")))
    assert other.samples[0].reward == 2.0
    # other tokens: the score is not theirs
    longer = run(
        make_rollout(reward=moody, journal=Journal(path), limit=7)(ROW, RolloutContext("g"))
    )
    assert longer.samples[0].reward == 3.0
    journal = Journal(path)
    journal.clear()
    assert (
        not path.exists()
        and run(make_rollout(reward=moody, journal=Journal(path))(ROW, RolloutContext("g")))
        .samples[0]
        .reward
        == 4.0
    )


def test_a_tolerated_failure_is_recorded_too(tmp_path: Path) -> None:
    """The judge was down then and is up now: the redone step still trains on what the first one
    had.
    """
    path = tmp_path / "j"
    run(
        make_rollout(reward=boom, journal=Journal(path), on_error="unscored")(
            ROW, RolloutContext("g")
        )
    )
    assert [
        s.reward for s in run(make_rollout(journal=Journal(path))(ROW, RolloutContext("g"))).samples
    ] == [None] * 4


def test_pure_rewards_are_not_journalled_and_cut_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "j"
    run(
        make_rollout(
            reward=[FunctionReward("mine", length_reward, pure=True)], journal=Journal(path)
        )(ROW, RolloutContext("g"))
    )  # type: ignore[arg-type]
    assert not path.exists()
    Journal(path).write("a", "1", {"x": [0.1 + 0.2, None]})
    with path.open("a") as file:
        file.write('{"group": "b", "tok')  # a crash
    Journal(path).write("c", "3", {"x": [1e-17]})
    Journal(path).write("d", "4", {"x": [2.0]})
    found = Journal(path)
    assert (
        found.find("a", "1") == {"x": [0.1 + 0.2, None]}
        and found.find("c", "3") == {"x": [1e-17]}
        and found.find("d", "4") == {"x": [2.0]}
    )
    assert found.find("b", "2") is None


@pytest.mark.parametrize("name", [tokens_hash, answers_hash])
def test_a_name_of_tokens_sees_every_token_and_border(
    name: Callable[[Sequence[Sequence[int] | memoryview]], str],
) -> None:
    different = ([[1, 2], [3]], [[1], [2, 3]], [[1, 2, 3]], [[1, 2], [4]], [[12], [3]], [[], []])
    assert len({name(c) for c in different}) == len(different)
    assert name([[1, 2], [3]]) == name([[1, 2], [3]])
    in_memory = [np.array([1, 2]).data, np.array([3, 0])[:1].data]
    assert name(in_memory) == name([[1, 2], [3]])


def test_scores_that_an_earlier_version_journalled_are_found(tmp_path: Path) -> None:
    """It named the answers by another hash."""
    calls: list[int] = []

    def moody(completions: list[str]) -> list[float]:
        calls.append(1)
        return [float(len(calls))] * len(completions)

    path = tmp_path / "j"
    made = run(make_rollout(reward=moody, journal=Journal(path))(ROW, RolloutContext("g")))
    answers = [s.tokens[s.trained].tolist() for s in made.samples]
    text = path.read_text()
    assert answers_hash(answers) in text
    path.write_text(text.replace(answers_hash(answers), tokens_hash(answers)))
    again = run(make_rollout(reward=moody, journal=Journal(path))(ROW, RolloutContext("g")))
    assert len(calls) == 1 and [s.reward for s in again.samples] == [1.0] * 4


# the source


def group_of(row: Row, name: str, rewards: Sequence[float | None]) -> Group:
    samples = [
        Sample.from_tokens(f"{name}#{i}", [1, 5, 6], [False, True, True], group=name, reward=r)
        for i, r in enumerate(rewards)
    ]
    return Group(row, samples, [""] * len(samples))


def scripted(
    rewards: Callable[[Row], Sequence[float | None]], seen: list[str]
) -> Callable[[Row, str], Any]:
    async def rollout(row: Row, context: RolloutContext) -> Group:
        name = context.group
        seen.append(name)
        await asyncio.sleep(0)
        return group_of(row, name, rewards(row))

    return rollout


ROWS = [Row(f"r{i}", f"p{i}") for i in range(10)]


def test_groups_come_in_the_cursors_order_with_names_of_their_own() -> None:
    seen: list[str] = []
    source = GroupSource(ROWS, Cursor(10, 0, False), scripted(lambda row: [0, 1], seen), 4)
    names = [[g.samples[0].group for g in run(take_batch(source)).groups] for _ in range(3)]
    assert names == [
        ["0:r0", "1:r1", "2:r2", "3:r3"],
        ["4:r4", "5:r5", "6:r6", "7:r7"],
        ["8:r8", "9:r9", "10:r0", "11:r1"],
    ]  # a second epoch, other draws
    assert source.cursor.taken == 12


def test_dynamic_sampling_refills() -> None:
    """Rows 0, 2, 4, ... have no signal: they are replaced, counted and not trained."""
    seen: list[str] = []
    source = GroupSource(
        ROWS,
        Cursor(10, 0, False),
        scripted(lambda row: [1, 1] if int(row.id[1:]) % 2 == 0 else [0, 1], seen),
        3,
        dynamic=True,
        max_refills=5,
    )
    batch = run(take_batch(source))
    assert [g.row.id for g in batch.groups] == ["r1", "r3", "r5"] and [
        g.row.id for g in batch.discarded
    ] == ["r0", "r2", "r4"]
    assert batch.rounds == 3 and source.cursor.taken == 6 and batch.sampled_tokens == 6 * 4
    metrics = rollout_metrics(batch, {})
    assert (
        metrics["groups/zero_variance"] == 0.5
        and metrics["groups/trained"] == 3
        and metrics["groups/rounds"] == 3
        and metrics["tokens/sampled"] == 24
    )
    assert metrics["reward/mean"] == 0.75


@pytest.mark.parametrize("cap", [0, 1, 3])
def test_dynamic_sampling_is_capped(cap: int) -> None:
    seen: list[str] = []
    source = GroupSource(
        ROWS,
        Cursor(10, 0, False),
        scripted(lambda row: [1, 1], seen),
        2,
        dynamic=True,
        max_refills=cap,
    )
    batch = run(take_batch(source))
    assert (
        batch.groups == []
        and len(batch.discarded) == len(seen) == 2 * (1 + cap)
        and batch.rounds == 1 + cap
    )


def test_without_dynamic_sampling_groups_stay() -> None:
    source = GroupSource(ROWS, Cursor(10, 0, False), scripted(lambda row: [1, 1], []), 3)
    assert len(run(take_batch(source)).groups) == 3


def test_signal() -> None:
    make = lambda *rewards: group_of(ROWS[0], "g", rewards)  # noqa: E731
    assert (
        has_signal(make(0, 1))
        and has_signal(make(0, None, 1))
        and not has_signal(make(1, 1))
        and not has_signal(make(1, None))
        and not has_signal(make(None))
    )


def test_a_cut_batch_gives_its_rows_back() -> None:
    """Cancelled in a refill round: the cursor is where the step began, and the engine holds
    nothing.
    """
    engine = FakeEngine(decode=decode)
    slow = SingleTurn(
        engine,
        lambda row: [5],
        decode,
        [FunctionReward("one", lambda completions: [1.0] * len(completions), pure=True)],
        Sampling(30),
        n=2,
        seed=0,
    )
    source = GroupSource(ROWS, Cursor(10, 0, True), slow, 3, dynamic=True, max_refills=50)

    async def work() -> None:
        source.cursor.take(2)
        task = asyncio.ensure_future(take_batch(source))
        while source.cursor.taken < 8:
            await asyncio.sleep(0)
        while not engine.running:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert source.cursor.taken == 2 and engine.running == 0

    run(work())


def test_one_failing_row_ends_the_round_and_cancels_the_rest() -> None:
    engine = FakeEngine(decode=decode)

    def fails_on_r1(completions: list[str], name: list[str]) -> list[float]:
        if name[0] == "1":
            raise ValueError("bad row")
        return [0.0] * len(completions)

    rows = [Row(f"r{i}", "p", {"name": str(i)}) for i in range(4)]
    rollout = SingleTurn(
        engine,
        lambda row: [5],
        decode,
        [FunctionReward("f", fails_on_r1, pure=True)],
        Sampling(1),
        n=1,
        seed=0,
    )
    source = GroupSource(rows, Cursor(4, 0, False), rollout, 4)
    with pytest.raises(InputError, match="row r1: reward f raised at .* ValueError: bad row"):
        run(take_batch(source))
    assert source.cursor.taken == 0 and engine.running == 0


def test_metrics_of_rewards() -> None:
    group = group_of(ROWS[0], "g", [1.0, 0.0, None, 0.5])
    metrics = rollout_metrics(RolloutBatch([group]), {})
    assert (
        metrics["reward/mean"] == 0.5
        and metrics["reward/std"] == 0.5
        and metrics["reward/unscored"] == 0.25
    )
