"""Shared by every test: no network, the tiny model, and what the machine must have
(helpers/needs.py).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

from helpers import needs

# `nohup make test` starts everything with SIGHUP ignored, and a run that finds it so keeps it so;
# several tests say what happens to a run that hears it
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(needs)


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A tiny Llama with a byte-level tokenizer on disk, in Hugging Face format."""
    from reinforge.models.tiny import make_tiny_model

    yield str(
        make_tiny_model(
            tmp_path_factory.mktemp("tiny") / "model",
            width=32,
            layers=2,
            heads=4,
            kv_heads=2,
            context=128,
        )
    )


@pytest.fixture
def make(tiny_dir: str, tmp_path: Path) -> Callable[..., Any]:
    """`make(name, algorithm, *overrides, **sections)`: the config of a small run of the
    tiny model.
    """
    from helpers.tiny_runs import make_config

    return partial(make_config, tiny_dir, tmp_path)
