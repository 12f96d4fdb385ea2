"""`train.profile`: the trace of the steps that were asked for, and nothing else changed."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from helpers.tiny_runs import digest, launch
from reinforge.config.schema import Config
from reinforge.core.errors import InputError
from reinforge.loops.step_profile import RANGE


def phases(trace: Path) -> Counter[str]:
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)
    return Counter(
        event["name"].removeprefix(RANGE)
        for event in events
        if str(event.get("name")).startswith(RANGE) and event.get("cat") == "user_annotation"
    )


def test_two_steps_of_four_are_in_the_trace(make: Callable[..., Config]) -> None:
    """Steps 2 and 3, with their phases by name and the checkpoint between them; the weights are
    those of a run that nobody looked at.
    """
    settings = ("grpo", "train.steps=4", "run.checkpoint.every=2")
    plain = make("plain", *settings)
    launch(plain)
    cfg = make("seen", *settings, "train.profile={steps: 2, after: 1}")
    launch(cfg)
    assert digest(cfg) == digest(plain)
    folder = Path(cfg.run.dir) / "profile"
    assert sorted(p.name for p in folder.iterdir()) == [
        "steps-2-3.table.txt",
        "steps-2-3.trace.json.gz",
    ]
    found = phases(folder / "steps-2-3.trace.json.gz")
    assert found["generate"] == found["train"] == 2
    assert found["checkpoint"] == 1
    table = (folder / "steps-2-3.table.txt").read_text()
    assert "aten::mm" in table and "Self CPU" in table


def test_a_thread_that_trains_is_in_the_trace(make: Callable[..., Config]) -> None:
    """With its phases, and the operations of its backward passes."""
    found = {}
    for overlap in ("true", "false"):
        cfg = make(
            f"seen-{overlap}",
            "grpo",
            "train.steps=4",
            "rollout.staleness=1",
            f"rollout.overlap={overlap}",
            "train.profile={steps: 2, after: 1}",
        )
        launch(cfg)
        trace = Path(cfg.run.dir) / "profile" / "steps-2-3.trace.json.gz"
        with gzip.open(trace, "rt") as file:
            events = json.load(file)["traceEvents"]
        backward = [e for e in events if str(e.get("name")).endswith("MmBackward0")]
        found[overlap] = len(backward), phases(trace)["prepare"]
    assert found["true"] == found["false"] and found["true"][0] > 0


def test_a_run_that_ends_before_leaves_what_there_is(make: Callable[..., Config]) -> None:
    cfg = make("short", "sft", "train.steps=2", "train.profile={steps: 9, after: 1}")
    launch(cfg)
    folder = Path(cfg.run.dir) / "profile"
    assert phases(folder / "steps-2-2.trace.json.gz")["train"] == 1


def test_a_resumed_run_may_be_profiled(make: Callable[..., Config]) -> None:
    """It is how a run is watched, not what it learns."""
    launch(make("run", "sft", "train.steps=1"))
    cfg = make("run", "sft", "train.steps=2", "train.profile={steps: 1, after: 0}")
    launch(cfg)
    assert (Path(cfg.run.dir) / "profile" / "steps-2-2.trace.json.gz").is_file()


@pytest.mark.parametrize("setting", ["tool: nsys", "memory: true"])
def test_what_only_a_gpu_has_is_refused_before_the_first_step(
    make: Callable[..., Config], setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cfg = make("none", "sft", "train.steps=2", f"train.profile={{{setting}}}")
    with pytest.raises(InputError, match="torch finds none") as refused:
        launch(cfg)
    assert str(refused.value).startswith(f"train.profile.{setting.split(':')[0]}")
    assert not (Path(cfg.run.dir) / "metrics.jsonl").exists()
