"""The source with its policies together: first-complete rounds, their journal, replay in a step,
and exact resume at every boundary.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import toy_rewards
from helpers.fake_engine import FakeEngine
from helpers.group_source import take_batch
from helpers.tiny_runs import DATA, lines
from helpers.toys import SilentView, run
from reinforge.algorithms.build import build
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.run import train_config
from reinforge.config.schema import Config
from reinforge.core.backend import State
from reinforge.core.batch import Batch
from reinforge.core.engine import Sampling
from reinforge.core.env import RolloutContext
from reinforge.core.sample import Group, Row, Sample
from reinforge.data.cursor import Cursor
from reinforge.rewards.function import FunctionReward
from reinforge.rollout.first_finished import first_finished
from reinforge.rollout.journal import Journal
from reinforge.rollout.players.single_turn import SingleTurn
from reinforge.rollout.rows.curriculum import LearnedDifficulty, QuantileRamp
from reinforge.rollout.rows.pass_rates import PassRateBands, PassRates
from reinforge.rollout.rows.replay import ReplayBuffer
from reinforge.rollout.rows.sampler import RowSampler, TeachableWeighting
from reinforge.rollout.source import GroupSource, RolloutBatch, has_signal, rollout_metrics

ROWS = [Row(f"r{i}", f"p{i}") for i in range(10)]


def group_of(row: Row, name: str, rewards: Sequence[float | None] = (0, 1)) -> Group:
    samples = [
        Sample.from_tokens(f"{name}#{i}", [1, 5, 6], [False, True, True], group=name, reward=r)
        for i, r in enumerate(rewards)
    ]
    return Group(row, samples, [""] * len(samples))


class Clock:
    """A rollout whose groups are complete after a number of ticks of their own; row i teaches
    unless it is in `flat`.
    """

    def __init__(self, ticks: Callable[[int], int], flat: Sequence[int] = ()):
        self.ticks = ticks
        self.flat = flat
        self.started: list[str] = []
        self.cancelled: list[str] = []

    async def __call__(self, row: Row, context: RolloutContext) -> Group:
        name = context.group
        self.started.append(name)
        i = int(row.id[1:])
        try:
            for _ in range(10 * self.ticks(i)):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        return group_of(row, name, [1, 1] if i in self.flat else [0, 1])


def taken(batch: RolloutBatch) -> list[str]:
    return [g.row.id for g in batch.groups]


# over-provisioning


def test_the_first_complete_groups_are_taken_in_the_order_of_submission() -> None:
    """Six are submitted for four; rows 1 and 4 are slowest and are cancelled."""
    clock = Clock(lambda i: [3, 9, 2, 1, 8, 4][i])
    source = GroupSource(ROWS, Cursor(10, 0, False), clock, 4, over_provision=1.5)
    batch = run(take_batch(source))
    assert (
        taken(batch) == ["r0", "r2", "r3", "r5"]
        and clock.cancelled == ["1:r1", "4:r4"]
        and source.cursor.taken == 6
    )
    assert batch.cancelled == 2 and rollout_metrics(batch, {})["groups/cancelled"] == 2
    assert batch.sampled_tokens == 4 * 4 and batch.discarded == []


def test_groups_without_signal_do_not_count_as_first() -> None:
    """Dynamic: 0 and 2 come first and teach nothing, so 1, 3 and 4 are waited for; 5 is not."""
    clock = Clock(lambda i: [1, 5, 2, 6, 7, 8][i], flat=[0, 2])
    source = GroupSource(
        ROWS, Cursor(10, 0, False), clock, 3, dynamic=True, max_refills=2, over_provision=2.0
    )
    batch = run(take_batch(source))
    assert (
        taken(batch) == ["r1", "r3", "r4"]
        and [g.row.id for g in batch.discarded] == ["r0", "r2"]
        and clock.cancelled == ["5:r5"]
    )
    metrics = rollout_metrics(batch, {})
    assert (
        batch.rounds == 1
        and metrics["tokens/discarded"] == 8
        and metrics["tokens/sampled"] == 20
        and metrics["groups/zero_variance"] == 0.4
    )


def test_rewards_of_turns_are_signal_too() -> None:
    """Equal last words, other turns on the way: such a group can teach.

    Equal sums cannot, whichever turn was paid.
    """

    def episode(i: int, turns: list[float]) -> Sample:
        sample = Sample.from_tokens(
            f"g#{i}", [1, 5, 6, 7], [False, True, True, True], group="g", reward=1.0
        )
        return sample.with_(token_rewards=torch.tensor([0.0, *turns, 0.0]))

    def group(*turns: list[float]) -> Group:
        return Group(ROWS[0], [episode(i, t) for i, t in enumerate(turns)], [""] * len(turns))

    assert has_signal(group([0.5, 0.0], [0.0, 0.0]))
    assert not has_signal(group([0.5, 0.0], [0.0, 0.5])) and not has_signal(
        group([0.0, 0.0], [0.0, 0.0])
    )


@pytest.mark.parametrize("name", ["gdpo", "grpo"])
def test_components_that_differ_are_signal_where_each_is_compared(name: str) -> None:
    """Totals tie (right and long, wrong and short), components do not: gdpo learns from such a
    group, grpo cannot.
    """
    algorithm = build(name, weights={"right": 1.0, "short": 2.0, "idle": 0.0})
    mixed = [
        ({"right": 1.0, "short": 0.0, "idle": 0.0}, 1.0),
        ({"right": 0.0, "short": 0.5, "idle": 1.0}, 1.0),
    ]
    idle = [
        ({"right": 1.0, "short": 0.0, "idle": 0.0}, 1.0),
        ({"right": 1.0, "short": 0.0, "idle": 1.0}, 1.0),
    ]

    def made(scores: list[tuple[dict[str, float], float]]) -> Group:
        samples = [
            Sample.from_tokens(f"s{i}", [5, 6], [False, True], group="g", rewards=r, reward=total)
            for i, (r, total) in enumerate(scores)
        ]
        return Group(Row("r", "p"), samples)

    found = made(mixed)
    batch = Batch.pack(found.samples)
    algorithm.advantages([batch])
    learns = bool(batch.streams["advantages"].abs().max() > 1e-3)
    assert has_signal(found, algorithm.compared) == learns == (name == "gdpo")
    assert not has_signal(made(idle), algorithm.compared)  # what has no weight says nothing
    assert rollout_metrics(RolloutBatch([found]), {}, algorithm.compared)[
        "groups/zero_variance"
    ] == float(not learns)


def test_dynamic_sampling_keeps_what_gdpo_can_learn_from(make: Callable[..., Config]) -> None:
    """Two rewards that always add up to the same total: no group is replaced, and the
    weights move.
    """
    rewards = [
        {"name": f"{toy_rewards.__file__}:odd_length", "weight": 2.0},
        {"name": f"{toy_rewards.__file__}:even_length"},
    ]
    cfg = make("run", "gdpo", "algorithm.dynamic_sampling=true", "train.steps=1", rewards=rewards)
    train_config(cfg, CallerObjects(data=DATA), SilentView())
    (step,) = lines(cfg)
    assert (
        step["reward/mean"] == 2.0
        and step["reward/std"] == 0.0
        and step["groups/zero_variance"] < 1
    )
    assert step["groups/trained"] > 0 and step["train/empty"] == 0


def test_a_row_that_is_solved_retires_although_dynamic_sampling_discards_its_groups() -> None:
    """Row 0 is always solved, so none of its groups is trained; it is met once in each epoch and
    sampled in the first only.
    """
    clock = Clock(lambda i: 1, flat=[0])
    rates = PassRates([row.id for row in ROWS], bands=PassRateBands(min_attempts=2))
    cursor = Cursor(10, 0, False)
    source = GroupSource(
        ROWS,
        cursor,
        clock,
        3,
        dynamic=True,
        max_refills=3,
        row_sampler=RowSampler(cursor, 0, [TeachableWeighting(rates, 0.0)]),
        passrates=rates,
    )
    for step in range(9):
        run(take_batch(source, step, step))
    assert cursor.epoch >= 2 and rates.status(0) == "solved" and int(rates.attempts[0]) == 2
    assert [name for name in clock.started if name.endswith(":r0")] == ["0:r0"]


def test_a_refill_round_is_over_provisioned_too() -> None:
    clock = Clock(lambda i: 1 + i, flat=[0, 1, 2])
    source = GroupSource(
        ROWS, Cursor(10, 0, False), clock, 2, dynamic=True, max_refills=2, over_provision=2.0
    )
    # round 1: 0..3, of which 3 teaches; round 2: 4 and 5 for one more
    batch = run(take_batch(source))
    assert (
        taken(batch) == ["r3", "r4"]
        and batch.rounds == 2
        and clock.cancelled == ["5:r5"]
        and batch.cancelled == 1
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_redone_step_takes_the_journalled_groups_whatever_is_first_now(
    tmp_path: Path, dynamic: bool
) -> None:
    """The order of completion is turned around; a new process with the journal takes the same
    groups, one without takes others. Everything is submitted again: the engine must see the same
    requests.
    """
    flat = [2] if dynamic else []
    kw: dict[str, Any] = {"over_provision": 2.0, "dynamic": dynamic, "max_refills": 2}
    path = tmp_path / "journal.jsonl"

    def batch(clock: Clock, journal: Journal) -> Any:
        return run(
            take_batch(GroupSource(ROWS, Cursor(10, 0, False), clock, 3, journal=journal, **kw))
        )

    first = batch(Clock(lambda i: 1 + i, flat), Journal(path))
    assert taken(first) == (["r0", "r1", "r3"] if dynamic else ["r0", "r1", "r2"])
    backwards = Clock(lambda i: 10 - i, flat)
    again = batch(backwards, Journal(path))
    assert taken(again) == taken(first) and [g.row.id for g in again.discarded] == [
        g.row.id for g in first.discarded
    ]
    # the slowest was one of the taken
    assert backwards.started == [f"{i}:r{i}" for i in range(6)] and backwards.cancelled == []
    assert taken(batch(Clock(lambda i: 10 - i, flat), None)) == ["r3", "r4", "r5"]
    journal = Journal(path)
    journal.clear()
    assert taken(batch(Clock(lambda i: 10 - i, flat), Journal(path))) == ["r3", "r4", "r5"]


def test_a_choice_of_other_groups_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path).write_choice(["0:r0", "1:r1"], ["1:r1"])
    Journal(path).write("g", "t", {"x": [1.0]})  # both kinds of entry in one file
    found = Journal(path)
    assert (
        found.find_choice(["0:r0", "1:r1"]) == ["1:r1"]
        and found.find_choice(["0:r0", "2:r2"]) is None
        and found.find("g", "t") == {"x": [1.0]}
    )


def test_without_spare_prompts_nothing_is_journalled(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    batch = run(
        take_batch(
            GroupSource(
                ROWS, Cursor(10, 0, False), Clock(lambda i: 5 - i), 4, journal=Journal(path)
            )
        )
    )
    assert (
        taken(batch) == ["r0", "r1", "r2", "r3"]
        and not path.exists()
        and "groups/cancelled" not in rollout_metrics(batch, {})
    )


def test_race_raises_the_first_failure_and_leaves_nothing_running() -> None:
    ended: list[int] = []

    async def work(i: int) -> int:
        try:
            for _ in range(5 * i):
                await asyncio.sleep(0)
            if i == 2:
                raise ValueError("two")
            return i
        finally:
            ended.append(i)

    seen: list[int] = []
    with pytest.raises(ValueError, match="two"):
        run(
            first_finished(
                [work(i) for i in (4, 1, 2, 3)], lambda place, result: bool(seen.append(result))
            )
        )
    assert seen == [1] and sorted(ended) == [1, 2, 3, 4]
    run(first_finished([], lambda place, result: True))


# replay in a step


def test_replayed_groups_take_the_place_of_fresh_ones() -> None:
    """Four prompts, a quarter of them replayed: from step 1 on three are sampled and one trained
    again, and the books balance.
    """
    source = GroupSource(
        ROWS,
        Cursor(10, 0, False),
        Clock(lambda i: 1, flat=[0]),
        4,
        replay=ReplayBuffer(ROWS, size=4, share=0.25, max_staleness=4, max_uses=1),
    )
    first = run(take_batch(source, 0, 0))
    second = run(take_batch(source, 1, 1))
    assert (
        taken(first) == ["r0", "r1", "r2", "r3"]
        and first.replayed == []
        and len(first.trained) == 4
    )
    assert (
        taken(second) == ["r4", "r5", "r6"]
        and [g.samples[0].group for g in second.replayed] == ["1:r1"]
        and len(second.trained) == 4
    )
    metrics = rollout_metrics(second, {})
    assert (
        metrics["tokens/sampled"] == 12
        and metrics["tokens/replayed"] == 4
        and metrics["groups/trained"] == 4
    )
    # samples made here carry version -1
    assert metrics["replay/groups"] == 1 and metrics["replay/staleness"] == 2


# everything at once: exact at every boundary


def resumable_source(
    journal: Journal | None = None,
) -> tuple[GroupSource, dict[str, Any], FakeEngine]:
    """Pass rates, a teachable preference, a learned curriculum, dynamic sampling, spare prompts and
    replay, on rows of known odds.
    """
    rows = [Row(f"r{i}", f"p{i}", {"p": (i % 5) / 4}) for i in range(15)]

    def passes(completions: list[str], p: list[float]) -> list[float]:
        return [float(ord(c[0]) < 64 * q) for c, q in zip(completions, p, strict=True)]

    engine = FakeEngine(vocabulary=64)
    rollout = SingleTurn(
        engine,
        lambda row: [5],
        engine.decode,
        [FunctionReward("passes", passes, pure=True)],
        Sampling(3),
        n=4,
        seed=0,
    )
    rates = PassRates([row.id for row in rows], bands=PassRateBands(min_attempts=4))
    replay = ReplayBuffer(rows, size=5, share=0.34, max_staleness=3, max_uses=2)
    cursor = Cursor(15, 0, True)
    row_sampler = RowSampler(
        cursor,
        0,
        [
            LearnedDifficulty(rates, QuantileRamp(0.3, 1.0, 6, least=6)),
            TeachableWeighting(rates, 0.2),
        ],
    )
    source = GroupSource(
        rows,
        cursor,
        rollout,
        6,
        dynamic=True,
        max_refills=2,
        row_sampler=row_sampler,
        over_provision=1.5,
        journal=journal,
        passrates=rates,
        replay=replay,
    )
    return source, {"cursor": cursor, "passrates": rates, "replay": replay}, engine


def described(batch: RolloutBatch) -> Any:
    samples = [
        (s.uid, s.tokens.tolist(), s.logprobs.tolist(), s.versions.tolist(), s.reward)
        for g in batch.trained
        for s in g.samples
    ]
    return (
        samples,
        [g.row.id for g in batch.discarded],
        batch.rounds,
        batch.cancelled,
        rollout_metrics(batch, {}),
    )


def snapshot(parts: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint holds: through JSON, with tensors copied."""
    states = {name: part.state() for name, part in parts.items()}
    copied = {
        name: State({k: t.clone() for k, t in s.tensors.items()}, json.loads(json.dumps(s.meta)))
        for name, s in states.items()
        if name != "cursor"
    }
    return {**copied, "cursor": json.loads(json.dumps(states["cursor"]))}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    tensors = all(
        (x.tensors[k] == t).all()
        for name in ("passrates", "replay")
        for x, y in [(a[name], b[name])]
        for k, t in y.tensors.items()
    )
    return (
        a["cursor"] == b["cursor"]
        and tensors
        and all(a[name].meta == b[name].meta for name in ("passrates", "replay"))
    )


def test_every_boundary_resumes_exactly_even_after_a_batch_that_was_cut() -> None:
    steps = 7

    async def go() -> None:
        source, parts, engine = resumable_source()
        saved = []
        whole = []
        for step in range(steps):
            saved.append(snapshot(parts))
            engine.version = step
            whole.append(described(await take_batch(source, step, step)))
        assert (
            any(w[4]["replay/groups"] for w in whole)
            and any(w[4]["sampling/skipped"] for w in whole)
            and any(w[1] for w in whole)
        )
        # every feature was at work
        assert any(w[3] for w in whole) and any(w[2] > 1 for w in whole)
        for start in range(steps):
            source, parts, engine = resumable_source()
            for name, part in parts.items():
                part.load(saved[start][name])
            task = asyncio.ensure_future(take_batch(source, start, start))
            for _ in range(start + 2):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert same(snapshot(parts), saved[start]) and engine.running == 0
            for step in range(start, min(start + 3, steps)):
                engine.version = step
                assert described(await take_batch(source, step, step)) == whole[step]

    run(go())
