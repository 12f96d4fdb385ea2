"""What the end-to-end tests share: one tiny model, and the uninterrupted runs that all others are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import runs


@dataclass
class Whole:
    """A configuration, and what came out of running it without interruption."""

    config: Path
    steps: int
    evidence: runs.Evidence
    seconds: float  # of training, after the start-up

    def command(self, *overrides: str) -> list[str]:
        return ["train", str(self.config), "run.dir=run", *overrides]

    def differences(self, run_dir: Path) -> list[str]:
        return runs.differences(run_dir, self.evidence, self.steps)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.make_model(tmp_path_factory.mktemp("model"))


def whole(folder: Path, config: Path, steps: int) -> Whole:
    process = runs.start(["train", str(config), "run.dir=whole"], folder, forked=True)
    assert process.wait() == 0, process.output()
    events = runs.lines(folder / "whole" / "events.jsonl")
    assert [e["kind"] for e in events][::len(events) - 1] == ["started", "finished"]
    return Whole(config, steps, runs.evidence(folder / "whole"), events[-1]["time"] - events[0]["time"])


@pytest.fixture(scope="session")
def grpo(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("grpo")
    return whole(folder, runs.write_config(folder, tiny), 14)


@pytest.fixture(scope="session")
def sft(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("sft")
    return whole(folder, runs.write_config(folder, tiny, "sft", train={"steps": 40}), 40)
