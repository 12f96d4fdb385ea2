"""What a run asks at its boundaries, without a model: the evaluator and the checkpointer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from reinforge.checkpoint import store
from reinforge.checkpoint.memory_snapshot import MemorySnapshot
from reinforge.config.load import config_from_dict
from reinforge.config.schema import Config
from reinforge.core.backend import State
from reinforge.loops.checkpointer import Checkpointer
from reinforge.loops.evaluator import Evaluator, EvalVerdict


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Config]:
    def config(*overrides: str) -> Config:
        return config_from_dict(
            {
                "model": {"path": "some/model"},
                "algorithm": {"name": "sft"},
                "data": {"source": "rows.jsonl"},
                "train": {"steps": 8, "learning_rate": 1e-5},
                "run": {"dir": str(tmp_path / "run")},
            },
            overrides=overrides,
        )

    return config


async def nothing() -> dict[str, float]:
    return {}


def test_when_an_evaluation_is_due(make: Callable[..., Config]) -> None:
    evaluator = Evaluator(make("eval.every=2", "eval.at_start=false"), nothing)
    assert [evaluator.due(step, ending=False) for step in range(5)] == [
        False,
        False,
        True,
        False,
        True,
    ]
    assert evaluator.due(3, ending=True)
    evaluator.judge(4, {})
    assert not evaluator.due(4, ending=True)  # it is done
    assert Evaluator(make(), nothing).due(0, ending=False)
    assert not Evaluator(make("eval.every=1")).due(1, ending=True)  # nothing is held out


def test_the_best_evaluation_and_the_end_are_by_metrics_of_their_own(
    make: Callable[..., Config],
) -> None:
    evaluator = Evaluator(
        make(
            "run.checkpoint.best=min:eval/loss",
            "eval.early_stop.metric=eval/accuracy",
            "eval.early_stop.patience=2",
        ),
        nothing,
    )
    assert evaluator.best_step() is None
    given = [(3.0, 0.5), (2.0, 0.5), (2.0, 0.6), (1.0, 0.6), (1.5, 0.1)]
    found = [
        evaluator.judge(step, {"eval/loss": loss, "eval/accuracy": accuracy})
        for step, (loss, accuracy) in enumerate(given)
    ]
    assert [verdict.improved for verdict in found] == [True, True, False, True, False]
    assert [verdict.stop for verdict in found[:-1]] == [None] * 4
    assert found[-1] == EvalVerdict(False, "eval/accuracy did not improve in 2 evaluations")
    assert evaluator.best_step() == 3
    assert evaluator.best["early_stop"] == {"value": 0.6, "step": 2, "metric": "eval/accuracy"}
    again = Evaluator(make("run.checkpoint.best=min:eval/loss"), nothing)
    again.load(evaluator.state())
    assert again.state() == {"evaluated": 4, "best": evaluator.best, "waiting": 2}


def test_an_evaluation_that_could_score_nothing_decides_nothing(
    make: Callable[..., Config],
) -> None:
    """Neither is it the best, nor does it use up patience."""
    evaluator = Evaluator(
        make(
            "run.checkpoint.best=eval/accuracy",
            "eval.early_stop.metric=eval/accuracy",
            "eval.early_stop.patience=2",
        ),
        nothing,
    )
    given = [math.nan, 0.5, math.nan, 0.4, math.nan]
    found = [evaluator.judge(i, {"eval/accuracy": value}) for i, value in enumerate(given)]
    assert found == [EvalVerdict(i == 1, None) for i in range(5)]
    assert evaluator.best_step() == 1 and evaluator.waiting == 1


class Thing:
    """A backend, or a part of a run: a tensor and a number."""

    def __init__(self, value: float):
        self.tensor = torch.full((3,), value)
        self.steps = int(value)

    def state(self) -> State:
        return State({"x": self.tensor.clone()}, {"steps": self.steps})

    def load(self, state: State) -> None:
        self.tensor = state.tensors["x"].clone()
        self.steps = state.meta["steps"]


def checkpointer(cfg: Config, value: float, **more: Any) -> Checkpointer:
    backend: Any = Thing(value)
    return Checkpointer(cfg, backend, {"mean": Thing(value + 0.5)}, **more)


def test_a_checkpoint_holds_the_backend_the_parts_and_the_run(make: Callable[..., Config]) -> None:
    cfg = make()
    told: list[str] = []

    def begins() -> Callable[[], None]:
        told.append("begins")
        return lambda: told.append("saved")

    saving = checkpointer(cfg, 4, on_saving=begins)
    assert saving.restore() is None
    saving.save(4, {"step": 4, "counters": {"updates": 7}}, None)
    assert told == ["begins"] and not saving.unsaved(4) and saving.unsaved(5)
    assert saving.written(wait=False) == store.steps(Path(cfg.run.dir))[0]
    assert told == ["begins", "saved"] and saving.written(wait=True) is None
    state, extra = store.load(store.steps(Path(cfg.run.dir))[0])
    assert set(state.tensors) == {"x", "part/mean/x"} and state.meta == {"steps": 4}
    assert extra == {"step": 4, "counters": {"updates": 7}, "parts": {"mean": {"steps": 4}}}
    other = checkpointer(cfg, 0)
    restored = other.restore()
    assert restored is not None and restored.extra == extra
    assert restored.changes is None  # there is no record of the configuration
    assert torch.equal(other.backend.tensor, torch.full((3,), 4.0))  # type: ignore[attr-defined]
    assert torch.equal(other.parts["mean"].tensor, torch.full((3,), 4.5))  # type: ignore[attr-defined]
    assert not other.unsaved(4)


def test_when_a_checkpoint_is_due(make: Callable[..., Config]) -> None:
    saving = checkpointer(make("run.checkpoint.every=3"), 1)

    def due(step: int, ending: bool = False, asked: bool = False) -> bool:
        return saving.due(step, ending=ending, asked=asked)

    assert [due(step) for step in range(5)] == [False, False, False, True, False]
    assert due(4, ending=True) and due(4, asked=True)
    assert not due(0, ending=True)
    saving.save(3, {"step": 3}, None)
    assert not due(3) and not due(3, ending=True)
    saving.reopen()
    assert due(3)


def test_the_best_checkpoint_is_kept(make: Callable[..., Config]) -> None:
    cfg = make("run.checkpoint.keep=1")
    saving = checkpointer(cfg, 1)
    for step in (1, 2, 3):
        saving.save(step, {"step": step}, best_step=1)
    assert [store.step_of(path) for path in store.steps(Path(cfg.run.dir))] == [3, 1]


class Elsewhere:
    """Tensors of other processes."""

    def write(self, folder: Path, prefix: str) -> dict[str, dict[str, Any]]:
        raise AssertionError("a snapshot writes nothing")

    def gather(self) -> dict[str, torch.Tensor]:
        return {"model/w": torch.arange(3.0)}

    def stage(self) -> None:
        return None


def test_a_snapshot_gathers_what_is_elsewhere() -> None:
    memory = MemorySnapshot(every=1)
    shards = {"": Elsewhere(), "part/ema/": Elsewhere()}
    memory.keep(1, State({"x": torch.ones(1)}, {"steps": 1}, shards), {"step": 1})
    state, _ = memory.load()
    assert set(state.tensors) == {"x", "model/w", "part/ema/model/w"}
    assert state.tensors["part/ema/model/w"].tolist() == [0.0, 1.0, 2.0] and not state.shards


def test_what_is_newer_in_memory_is_continued(make: Callable[..., Config]) -> None:
    cfg = make()
    memory = MemorySnapshot(every=2)
    saving = checkpointer(cfg, 1, memory=memory)
    saving.save(1, {"step": 1}, None)
    assert [saving.snapshot_due(step) for step in range(1, 5)] == [False, True, False, True]
    saving.snapshot(2, {"step": 2})
    other = checkpointer(cfg, 0, memory=memory)
    restored = other.restore()
    assert restored is not None and restored.extra["step"] == 2
    assert other.unsaved(2)  # the disk does not have it
    saving.save(3, {"step": 3}, None)
    restored = checkpointer(cfg, 0, memory=memory).restore()
    assert restored is not None and restored.extra["step"] == 3


def test_a_state_that_does_not_settle_in_time_is_not_saved(make: Callable[..., Config]) -> None:
    asked: list[str] = []

    async def soon() -> None:
        asked.append("soon")

    async def never() -> None:
        asked.append("never")
        await asyncio.sleep(60)

    ready = checkpointer(make(), 1, settle=soon)
    assert asyncio.run(ready.settle_within(2, 10)) and ready.unsaved(2)
    slow = checkpointer(make(), 1, settle=never)
    assert not asyncio.run(slow.settle_within(2, 0.01))
    slow.leave(2)
    assert not slow.unsaved(2)
    # there is nothing left to save: nobody waits
    assert asyncio.run(slow.settle_within(2, 10)) and asked == ["soon", "never"]
