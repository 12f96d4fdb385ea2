"""Checkpoints that a thread writes while the run goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.tiny_runs import digest, launch, lines, make_config
from reinforge.checkpoint import store
from reinforge.checkpoint.background import StagingCopies
from reinforge.config.schema import Config
from reinforge.core.backend import State
from reinforge.core.errors import InputError
from reinforge.loops.checkpointer import Checkpointer
from reinforge.rollout.journal import Journal, past_of

BACKGROUND = "run.checkpoint.background=true"


@pytest.fixture
def make(tiny_dir: str, tmp_path: Path) -> Callable[..., Config]:
    def made(name: str, *overrides: str) -> Config:
        return make_config(tiny_dir, tmp_path, name, "sft", "run.checkpoint.every=1", *overrides)

    return made


class Weights:
    """A backend whose weight changes in place, as those of a run do."""

    def __init__(self) -> None:
        self.weight = torch.zeros(4)

    def state(self) -> State:
        return State({"model/w": self.weight, "model/tied": self.weight}, {"steps": 1})


class SlowDisk:
    """Stands in for `store.save`: nothing is written until `go` is set."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.go = threading.Event()
        self.threads: list[str] = []
        self._save = store.save
        patch.setattr(store, "save", self)

    def __call__(self, *args: Any) -> Path:
        self.threads.append(threading.current_thread().name)
        assert self.go.wait(30)
        return self._save(*args)


def test_the_run_goes_on_while_a_copy_is_written(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk(monkeypatch)
    backend: Any = Weights()
    told: list[str] = []

    def begins() -> Callable[[], None]:
        told.append("begun")
        return lambda: told.append("on disk")

    saving = Checkpointer(make("run", BACKGROUND), backend, on_saving=begins)
    extra = {"step": 1, "counters": {"updates": 1}}
    saving.save(1, extra, None)
    backend.weight.add_(7)  # the next step
    extra["counters"]["updates"] = 2  # type: ignore[index]
    assert saving.written(wait=False) is None and told == ["begun"]
    assert not store.steps(saving.dir)
    disk.go.set()
    path = saving.written(wait=True)
    assert path is not None and told == ["begun", "on disk"] and disk.threads == ["checkpoint"]
    state, stored = store.load(path)
    assert state.tensors["model/w"].tolist() == [0.0] * 4
    assert stored["counters"] == {"updates": 1}
    # tied weights are stored once
    assert state.tensors["model/tied"].data_ptr() == state.tensors["model/w"].data_ptr()


def test_the_next_checkpoint_waits_for_the_one_before(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk(monkeypatch)
    backend: Any = Weights()
    saving = Checkpointer(make("run", BACKGROUND), backend)
    saving.save(1, {"step": 1}, None)
    began = time.monotonic()
    threading.Timer(0.3, disk.go.set).start()
    saving.save(2, {"step": 2}, None)
    assert time.monotonic() - began > 0.25
    saving.written(wait=True)
    assert [store.step_of(p) for p in store.steps(saving.dir)] == [2, 1]


def test_a_run_is_the_same_and_its_events_are_told(make: Callable[..., Config]) -> None:
    plain, background = make("plain"), make("background", BACKGROUND)
    for cfg in (plain, background):
        launch(cfg)
        saved = [e for e in lines(cfg, "events.jsonl") if e["kind"] == "checkpoint"]
        assert [(e["step"], e["path"]) for e in saved] == [
            (step, f"step-{step:08d}") for step in (1, 2, 3)
        ]
        assert len(store.steps(Path(cfg.run.dir))) == 2  # those before were removed
    assert digest(background) == digest(plain)


def test_what_the_thread_cannot_write_ends_the_run(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest checkpoint is the one before, and the run continues from it."""
    cfg = make("run", BACKGROUND)
    write = store._write

    def full(folder: Path, step: int, *args: Any) -> None:
        write(folder, step, *args)
        if step == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "_write", full)
    with pytest.raises(InputError, match="the checkpoint of step 2 .* could not be written.*No sp"):
        launch(cfg)
    assert [p.name for p in store.steps(Path(cfg.run.dir))] == ["step-00000001"]
    monkeypatch.undo()
    launch(cfg)
    whole = make("whole")
    launch(whole)
    assert digest(cfg) == digest(whole)


def test_a_journal_keeps_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.write("a", "1", {"r": [1.0]})
    retire = journal.seal()
    journal.write("b", "2", {"r": [2.0]})
    # killed before the checkpoint is on disk: both are needed
    both = Journal(tmp_path / "journal.jsonl")
    assert both.find("a", "1") == {"r": [1.0]} and both.find("b", "2") == {"r": [2.0]}
    retire()
    after = Journal(tmp_path / "journal.jsonl")
    assert after.find("a", "1") is None and after.find("b", "2") == {"r": [2.0]}
    assert '"a"' in past_of(tmp_path / "journal.jsonl").read_text()
    journal.clear()
    assert not (tmp_path / "journal.jsonl").exists()


def test_copies_are_apart_from_the_originals() -> None:
    weight = torch.arange(6.0).view(2, 3)
    staged = StagingCopies().of(State({"a": weight, "b": weight, "c": weight.t()}, {"n": 1}))
    weight.zero_()
    assert staged.tensors["a"].tolist() == [[0, 1, 2], [3, 4, 5]] and staged.meta == {"n": 1}
    assert staged.tensors["a"].data_ptr() == staged.tensors["b"].data_ptr()
    assert staged.tensors["c"].tolist() == [[0, 3], [1, 4], [2, 5]]
