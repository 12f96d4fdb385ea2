"""A real run of GRPO for the tests of the web app, with every token recorded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.tiny_runs import DATA, EVAL
from helpers.toy_rewards import digits, short
from helpers.toys import SilentView
from helpers.web_app import AppClient, web_app
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.run import train_config
from reinforge.config.load import config_from_dict

STEPS = 4


@pytest.fixture(scope="session")
def runs(tiny_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one run in it: `first/grpo`."""
    root = tmp_path_factory.mktemp("web") / "runs"
    rewards = [digits, short]
    config = config_from_dict(
        {
            "model": {"path": tiny_dir, "device": "cpu"},
            "algorithm": {"name": "grpo", "group_size": 4},
            "data": {"source": "python"},
            "rewards": [{"name": f.__name__, "weight": w} for f, w in zip(rewards, (1.0, 0.5))],
            "rollout": {"max_new_tokens": 6, "kv_gib": 0.01},
            "train": {"steps": STEPS, "prompts_per_step": 4, "learning_rate": 1e-2},
            "eval": {"every": 2, "samples": 1},
            "run": {
                "dir": str(root / "first" / "grpo"),
                "checkpoint": {"every": 2, "keep": 5},
                "log": {"samples_every": 1, "samples": 16, "tokens": "all"},
            },
        },
        where="test",
    )
    given = CallerObjects(data=DATA, eval_data=EVAL, rewards=rewards)
    train_config(config, given, SilentView())
    return root


@pytest.fixture(scope="session")
def app(runs: Path) -> Iterator[AppClient]:
    with web_app(runs) as client:
        yield client
