"""`train.profile` on a GPU: memory by line of code, and ranges for Nsight Systems."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from helpers.tiny_runs import launch
from reinforge.config.schema import Config

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_the_history_of_memory_names_lines_of_code(make: Callable[..., Config]) -> None:
    cfg = make(
        "memory",
        "sft",
        "model.device=cuda",
        "train.steps=3",
        "train.profile={steps: 1, after: 1, memory: true}",
    )
    launch(cfg)
    path = Path(cfg.run.dir) / "profile" / "steps-2-2.memory.pickle"
    snapshot = pickle.loads(path.read_bytes())
    events = [event for device in snapshot["device_traces"] for event in device]
    files = {frame["filename"] for event in events for frame in event.get("frames", [])}
    assert any("reinforge" in file for file in files)
    assert {"alloc", "free_requested"} <= {event["action"] for event in events}


def test_phases_are_ranges_of_nvtx(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is handed to Nsight, in order: a start, phases, a stop."""
    said: list[str] = []
    push = torch.cuda.nvtx.range_push
    monkeypatch.setattr(
        torch.cuda.nvtx, "range_push", lambda name: (said.append(name), push(name))[1]
    )
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: said.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: said.append("stop"))
    cfg = make(
        "nsys",
        "sft",
        "model.device=cuda",
        "train.steps=3",
        "train.profile={steps: 1, after: 1, tool: nsys}",
    )
    launch(cfg)
    assert said[0] == "start" and said[-1] == "stop"
    assert said.count("phase train") == 1
