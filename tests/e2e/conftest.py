"""What the end-to-end tests share: one tiny model, and the uninterrupted runs that all others are
compared with.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers import cli_runs
from helpers.cli_runs import Whole


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cli_runs.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def grpo(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("grpo")
    return cli_runs.whole(folder, cli_runs.write_config(folder, tiny), 14)


@pytest.fixture(scope="session")
def sft(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("sft")
    return cli_runs.whole(
        folder, cli_runs.write_config(folder, tiny, "sft", train={"steps": 40}), 40
    )
