"""Rollouts ahead of training: the bound is kept, nothing is trained twice, versions tell the truth,
and a resumed run is the same run.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.tiny_runs import EVAL, digest, launch, lines
from reinforge.build.evaluation import with_average
from reinforge.checkpoint import store
from reinforge.config.schema import Config
from reinforge.core.backend import State
from reinforge.core.env import RolloutContext
from reinforge.core.errors import InputError
from reinforge.core.sample import Group, Row, Sample, Stop
from reinforge.data.cursor import Cursor
from reinforge.loops.rl import RLTrainer
from reinforge.plan.preflight import preflight
from reinforge.rollout.buffer import Due, RolloutBuffer
from reinforge.rollout.group_state import groups_from_state, groups_to_state
from reinforge.rollout.source import GroupSource, rollout_metrics

ROWS = [Row(f"r{i}", f"p{i}") for i in range(64)]


class FakeRollouts:
    """A rollout with an engine's version; it can be made to wait between generating and scoring."""

    def __init__(self) -> None:
        self.version = 0
        self.generated = list[str]()
        self.scored = list[str]()
        self.scores = asyncio.Event()
        self.lag = 0  # an engine that missed updates
        self.ticks = 1

    async def __call__(self, row: Row, context: RolloutContext) -> Group:
        name = context.group
        for _ in range(self.ticks):
            await asyncio.sleep(0)
        version = torch.tensor(
            [-1, self.version - self.lag, self.version - self.lag], dtype=torch.int32
        )
        self.generated.append(name)
        context.generated()
        await self.scores.wait()
        self.scored.append(name)
        samples = [
            Sample.from_tokens(
                f"{name}#{i}", [1, 5, 6], [False, True, True], group=name, reward=float(i)
            ).with_(versions=version)
            for i in (0, 1)
        ]
        return Group(row, samples, ["", ""])


async def trained(
    buffer: RolloutBuffer, rollouts: FakeRollouts, steps: int, start: int = 0
) -> list[list[tuple[str, int]]]:
    """[[(group, version) of each step]]; step k has the weights of version k."""
    out = []
    for step in range(start, steps):
        rollouts.version = step
        await buffer.advance(step, step)
        rollouts.scores.set()
        batch = await buffer.take(step)
        if buffer.due == "update":
            await buffer.until_generated()
        out.append([(g.samples[0].group, int(g.samples[0].versions[-1])) for g in batch.groups])
    return out


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_every_step_trains_what_was_sampled_so_many_steps_before(staleness: int) -> None:
    async def go() -> None:
        rollouts = FakeRollouts()
        buffer = RolloutBuffer(
            GroupSource(ROWS, Cursor(64, 0, False), rollouts, 4), staleness, last=10
        )
        steps = await trained(buffer, rollouts, 10)
        names = [name for step in steps for name, _ in step]
        assert names == [f"{i}:r{i}" for i in range(40)]  # each once, in the order of the data
        assert [v for step in steps for _, v in step] == [
            max(0, k - staleness) for k in range(10) for _ in range(4)
        ]
        # nothing was generated for a step that does not come
        assert not buffer.in_flight and buffer.source.cursor.taken == 40

    asyncio.run(go())


async def lost_after_generating(row: Row, context: RolloutContext) -> Group:
    context.generated()
    for _ in range(5):
        await asyncio.sleep(0)
    raise RuntimeError("lost")


def test_what_went_wrong_before_anybody_asked_is_heard_when_it_is_closed() -> None:
    """As where the engine is lost and something else noticed it first: a task that failed unheard
    is told of by the garbage collector, whenever that may be.
    """
    unheard: list[str] = []

    async def go() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: unheard.append(context["message"]))
        source = GroupSource(ROWS, Cursor(64, 0, False), lost_after_generating, 4)
        buffer = RolloutBuffer(source, 0, last=10)
        await buffer.advance(0, 0)
        await asyncio.sleep(0.01)
        assert buffer.in_flight[0].task is not None and buffer.in_flight[0].task.done()
        await buffer.close()
        buffer.in_flight.clear()
        gc.collect()

    asyncio.run(go())
    assert unheard == []


def test_training_goes_on_while_scores_are_missing() -> None:
    """`advance` needs tokens, `take` needs the scores of its own step only."""

    async def go() -> None:
        rollouts = FakeRollouts()
        buffer = RolloutBuffer(GroupSource(ROWS, Cursor(64, 0, False), rollouts, 2), 1, last=5)
        await asyncio.wait_for(buffer.advance(0, 0), 5)
        assert len(rollouts.generated) == 4 and rollouts.scored == []
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(buffer.take(0), 0.05)
        # a batch ahead stays where it is when the wait for it is cut
        assert len(buffer.in_flight) == 2
        rollouts.scores.set()
        assert [g.row.id for g in (await buffer.take(0)).groups] == ["r0", "r1"]
        rollouts.scores.clear()
        await asyncio.wait_for(buffer.advance(1, 1), 5)
        assert rollouts.generated[4:] == ["4:r4", "5:r5"] and len(rollouts.scored) == 4
        await buffer.close()

    asyncio.run(go())


def test_the_average_is_evaluated_when_nothing_is_under_way() -> None:
    """An engine elsewhere goes on while the run evaluates: with the average in its place it would
    sample what no version of the policy did.
    """

    async def go() -> None:
        rollouts = FakeRollouts()
        average = 1000
        seen = list[int]()
        rollouts.ticks = 20
        rollouts.scores.set()
        buffer = RolloutBuffer(
            GroupSource(ROWS, Cursor(64, 0, False), rollouts, 2), 1, last=5, due="whenever"
        )
        swapped = False

        @contextmanager
        def swap() -> Iterator[None]:
            nonlocal swapped
            swapped = True
            yield
            swapped = False

        async def update(weights: Any, version: int) -> None:
            rollouts.version = average if swapped else version

        async def evaluate() -> dict[str, float]:
            for _ in range(50):
                await asyncio.sleep(0)
            seen.append(rollouts.version)
            return {}

        backend: Any = SimpleNamespace(
            ema=SimpleNamespace(swapped=swap), weights=lambda: None, steps=0
        )
        engine: Any = SimpleNamespace(update=update)
        await buffer.advance(0, 0)
        assert not rollouts.generated
        run = with_average(evaluate, backend, engine, buffer.settle)
        assert run is not None
        await run()
        assert seen == [average] and rollouts.version == 0 and len(rollouts.generated) == 4
        for step in (0, 1):
            assert {
                int(v) for g in (await buffer.take(step)).groups for v in g.samples[0].versions[1:]
            } == {0}

    asyncio.run(go())


@pytest.mark.parametrize("staleness", [0, 1])
def test_what_was_cut_is_begun_again(staleness: int) -> None:
    async def go() -> None:
        rollouts = FakeRollouts()
        source = GroupSource(ROWS, Cursor(64, 0, False), rollouts, 2)
        buffer = RolloutBuffer(source, staleness, last=9)
        rollouts.scores.set()
        whole = await trained(
            RolloutBuffer(GroupSource(ROWS, Cursor(64, 0, False), rollouts, 2), staleness, last=9),
            rollouts,
            4,
        )
        again = await trained(buffer, rollouts, 2)
        before = source.cursor.taken
        held = len(buffer.in_flight)
        rollouts.version = 2
        cut = asyncio.ensure_future(buffer.advance(2, 2))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        cut.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cut
        assert source.cursor.taken == before and len(buffer.in_flight) == held
        assert again + await trained(buffer, rollouts, 4, start=2) == whole

    asyncio.run(go())


def test_an_engine_elsewhere_is_not_waited_for_and_old_samples_are_dropped() -> None:
    async def go() -> None:
        rollouts = FakeRollouts()
        rollouts.scores.set()
        rollouts.ticks = 20
        buffer = RolloutBuffer(
            GroupSource(ROWS, Cursor(64, 0, False), rollouts, 2), 1, last=9, due="whenever"
        )
        await buffer.advance(0, 0)
        assert rollouts.generated == []  # only begun
        await buffer.take(0)
        rollouts.version = 1
        rollouts.lag = 1
        await buffer.advance(1, 1)  # begins step 2, with an engine that still has version 0
        assert len((await buffer.take(1)).groups) == 2
        await buffer.settle()
        rollouts.version = 2
        rollouts.lag = 0
        await buffer.advance(2, 2)
        batch = await buffer.take(2)
        # sampled by version 0, and at least 1 was promised
        assert batch.groups == [] and len(batch.stale) == 2
        assert rollout_metrics(batch, {})["tokens/stale"] == 8 == batch.sampled_tokens
        await buffer.close()

    asyncio.run(go())


def test_an_engine_beside_training_has_one_batch_at_a_time() -> None:
    """What comes next is begun when everything before it has its tokens, and is not waited for
    until the update; with the same weights as where generating and training take turns.
    """

    async def go() -> None:
        whole = FakeRollouts()
        whole.scores.set()
        source = GroupSource(ROWS, Cursor(64, 0, False), whole, 2)
        expected = await trained(RolloutBuffer(source, 2, last=6), whole, 6)

        rollouts = FakeRollouts()
        rollouts.scores.set()
        rollouts.ticks = 20
        source = GroupSource(ROWS, Cursor(64, 0, False), rollouts, 2)
        buffer = RolloutBuffer(source, 2, last=6, due="update")
        found = []
        for step in range(6):
            rollouts.version = step
            await buffer.advance(step, step)
            newest = buffer.in_flight[-1]
            assert newest.generating == (newest.made == step)
            assert not any(entry.generating for entry in list(buffer.in_flight)[:-1])
            batch = await buffer.take(step)
            await buffer.until_generated()
            assert not any(entry.generating for entry in buffer.in_flight)
            found.append(
                [(g.samples[0].group, int(g.samples[0].versions[-1])) for g in batch.groups]
            )
        assert found == expected

    asyncio.run(go())


def test_a_run_that_is_asked_to_end_does_not_wait_for_tokens() -> None:
    """What is being generated beside the step is begun again, by the same weights: it is not part
    of the checkpoint, and what has all its tokens is.
    """

    async def go() -> None:
        rollouts = FakeRollouts()
        rollouts.scores.set()
        rollouts.ticks = 20
        source = GroupSource(ROWS, Cursor(64, 0, False), rollouts, 2)
        buffer = RolloutBuffer(source, 1, last=6, due="update")
        await buffer.advance(0, 0)
        await buffer.cut_unfinished()
        assert source.cursor.taken == 2 and [entry.step for entry in buffer.in_flight] == [0]
        await buffer.cut_unfinished()  # it has its tokens, and stays
        await buffer.settle()
        assert [entry["step"] for entry in buffer.state().meta["begun"]] == [0]
        groups = await trained(buffer, rollouts, 3)
        again = FakeRollouts()
        again.scores.set()
        source = GroupSource(ROWS, Cursor(64, 0, False), again, 2)
        assert groups == await trained(RolloutBuffer(source, 1, last=6), again, 3)

        await buffer.close()

    asyncio.run(go())


@pytest.mark.parametrize("due", ["training", "update", "whenever"])
def test_training_leaves_the_loop_free_for_an_engine_that_generates(due: Due) -> None:
    async def go() -> tuple[int, str]:
        trainer = object.__new__(RLTrainer)
        trainer.buffer = RolloutBuffer(
            GroupSource(ROWS, Cursor(64, 0, False), FakeRollouts(), 2), 1, due=due
        )
        ticks = 0
        over = False

        async def listens() -> None:
            nonlocal ticks
            while not over:
                ticks += 1
                await asyncio.sleep(0.01)

        listener = asyncio.ensure_future(listens())
        result = await trainer._aside(lambda x: (time.sleep(0.3), x)[1], "done")
        over = True
        await listener
        return ticks, result

    ticks, result = asyncio.run(go())
    assert result == "done" and (ticks <= 2 if due == "training" else ticks > 5)


def test_the_buffer_survives_and_a_smaller_bound_drops_it() -> None:
    async def go() -> None:
        rollouts = FakeRollouts()
        rollouts.scores.set()
        source = GroupSource(ROWS, Cursor(64, 0, False), rollouts, 2)
        buffer = RolloutBuffer(source, 2, last=20)
        await trained(buffer, rollouts, 3)
        await buffer.settle()
        state = buffer.state()
        assert [e["step"] for e in state.meta["begun"]] == [3, 4] and [
            e["made"] for e in state.meta["begun"]
        ] == [1, 2]
        rollouts.version = 3
        rest = await trained(buffer, rollouts, 8, start=3)

        cursor = Cursor(64, 0, False)
        cursor.take(10)  # 5 batches of 2
        resumed = RolloutBuffer(GroupSource(ROWS, cursor, rollouts, 2), 2, last=20)
        resumed.load(State(dict(state.tensors), state.meta))
        assert await trained(resumed, rollouts, 8, start=3) == rest

        cursor.load({**cursor.state(), "taken": 10})
        smaller = RolloutBuffer(GroupSource(ROWS, cursor, rollouts, 2), 1, last=20)
        smaller.load(State(dict(state.tensors), state.meta))
        rollouts.version = 3
        await smaller.advance(3, 3)
        batch = await smaller.take(3)
        assert [g.row.id for g in batch.groups] == ["r10", "r11"] and len(batch.stale) == 4

    asyncio.run(go())


def test_groups_are_saved_whole() -> None:
    sample = Sample.from_tokens(
        "g#0",
        [1, 5, 6],
        [False, True, True],
        group="g",
        reward=1.5,
        rewards={"a": None, "b": 1.5},
        stop=Stop.LENGTH,
        token_rewards=torch.tensor([0.0, 0.5, 0.0]),
        baseline=0.25,
        streams={"by_reference": torch.ones(3)},
        extras={"image": torch.arange(4)},
    )
    given = Sample.from_tokens("g#given", [1, 9], [False, True], group="g")
    groups = [
        Group(
            ROWS[3],
            [sample, sample.with_(uid="g#1")],
            ["x", "y"],
            7,
            {"timeouts": 1},
            {"env/turns": 2.0},
            given,
        ),
        Group(ROWS[0], [sample], ["z"]),
    ]
    first, second = groups_from_state(groups_to_state(groups), {r.id: r for r in ROWS}, "buffer")
    assert first.row is ROWS[3] and (
        first.texts,
        first.extra_tokens,
        first.faults,
        first.metrics,
    ) == (
        ["x", "y"],
        7,
        {"timeouts": 1},
        {"env/turns": 2.0},
    )
    assert (
        first.given is not None
        and first.given.tokens.tolist() == [1, 9]
        and second.given is None
        and len(second.samples) == 1
    )
    found = first.samples[1]
    assert (found.uid, found.reward, found.rewards, found.stop, found.baseline) == (
        "g#1",
        1.5,
        {"a": None, "b": 1.5},
        Stop.LENGTH,
        0.25,
    )
    assert (
        found.token_rewards is not None
        and found.token_rewards.tolist() == [0, 0.5, 0]
        and found.streams["by_reference"].tolist() == [1, 1, 1]
    )
    assert found.extras["image"].tolist() == [0, 1, 2, 3] and found.versions.tolist() == [
        -1,
        -1,
        -1,
    ]
    with pytest.raises(InputError, match="buffer holds row r3"):
        groups_from_state(groups_to_state(groups), {"r0": ROWS[0]}, "buffer")


# whole runs


class Crash(Exception):
    pass


def drop(line: dict[str, Any]) -> dict[str, Any]:
    return {
        k: v
        for k, v in line.items()
        if not k.startswith(("time", "share", "memory", "tokens_per_second", "efficiency"))
    }


@pytest.mark.parametrize(
    ("staleness", "overrides"),
    [(1, ()), (2, ("algorithm.epochs=2",)), (1, ("sampling.prefer=teachable",))],
    ids=str,
)
def test_a_resumed_run_is_the_same_run(
    make: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
    staleness: int,
    overrides: tuple[str, ...],
) -> None:
    settings = (
        "train.steps=6",
        "run.checkpoint.every=2",
        "eval.every=3",
        f"rollout.staleness={staleness}",
        *overrides,
    )
    whole = make("whole", "grpo", *settings)
    cut = make("cut", "grpo", *settings)
    launch(whole, eval_data=EVAL)
    from reinforge.backends.local import LocalBackend

    original = LocalBackend.step
    last = 7 if "algorithm.epochs=2" in overrides else 3

    def dies(self: LocalBackend) -> Any:
        if self.steps == last:
            raise Crash
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(LocalBackend, "step", dies)
        with pytest.raises(Crash):
            launch(cut, eval_data=EVAL)
    state, extra = store.load(store.steps(Path(cut.run.dir))[0])
    assert extra["step"] == 2 and [e["step"] for e in extra["parts"]["ahead"]["begun"]] == list(
        range(2, 2 + staleness)
    )
    assert any(name.startswith("part/ahead/0/groups/") for name in state.tensors)
    launch(cut, eval_data=EVAL)
    assert digest(cut) == digest(whole)
    assert [drop(m) for m in lines(cut)] == [drop(m) for m in lines(whole)]
    assert [m["rollout/staleness"] for m in lines(whole) if "rollout/staleness" in m] == [
        min(k, staleness) for k in range(6)
    ]


def test_the_ratio_is_to_who_sampled(make: Callable[..., Config]) -> None:
    """One step late, at a large learning rate, the ratio is not 1; on time it is."""
    ratios = {}
    for staleness in (0, 1):
        cfg = make(
            f"s{staleness}",
            "grpo",
            "train.steps=5",
            "train.learning_rate=0.01",
            f"rollout.staleness={staleness}",
        )
        launch(cfg)
        ratios[staleness] = [
            abs(m["mismatch/ratio/max"] - 1) for m in lines(cfg) if "mismatch/ratio/max" in m
        ]
    assert max(ratios[0]) < 1e-4 and max(ratios[1][1:]) > 1e-2, ratios


def test_one_step_late_it_still_learns(make: Callable[..., Config]) -> None:
    cfg = make(
        "late",
        "grpo",
        "train.steps=40",
        "train.learning_rate=0.005",
        "rollout.staleness=1",
        "train.prompts_per_step=8",
    )
    launch(cfg)
    rewards = [m["reward/mean"] for m in lines(cfg)]
    assert sum(rewards[-8:]) / 8 > sum(rewards[:8]) / 8 + 0.2, rewards


# what cannot be, and what is told


@pytest.mark.parametrize(
    ("sections", "overrides", "says"),
    [
        ({"sampling": {"replay": {"share": 0.5}}}, (), "sampling.replay"),
        (
            {"rewards": [{"name": "helpers.toy_rewards:odd", "scale": "running"}]},
            (),
            "running mean",
        ),
    ],
)
def test_combinations_that_are_refused(
    make: Callable[..., Config], sections: dict[str, Any], overrides: tuple[str, ...], says: str
) -> None:
    with pytest.raises(InputError, match=says):
        make("x", "grpo", "rollout.staleness=1", *overrides, **sections)


def test_plan_warns_where_nothing_corrects(make: Callable[..., Config]) -> None:
    def told(*overrides: str, algorithm: str = "rloo") -> str:
        return " ".join(preflight(make("x", algorithm, *overrides)).warnings)

    assert "rollout.staleness" in told("rollout.staleness=1") and "rollout.staleness" not in told(
        "rollout.staleness=0"
    )
    assert "rollout.staleness" not in told("rollout.staleness=1", "algorithm.correction.name=tis")
    assert "rollout.staleness" not in told("rollout.staleness=1", algorithm="grpo")
    assert "algorithm.dynamic_sampling" in told("rollout.staleness=1", algorithm="dapo")
