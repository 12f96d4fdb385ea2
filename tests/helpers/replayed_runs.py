"""Five kinds of runs whose steps are replayed, in tests and by benchmarks/replay.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers.cli_runs import merged
from reinforge.config.load import config_from_dict
from reinforge.config.schema import Config

KINDS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "ppo": {
        "algorithm": {"name": "ppo", "epochs": 2, "minibatches": 2},
        "critic": {"learning_rate": 1e-3, "warmup": 2},
    },
    "multi-turn": {
        "data": {"source": "games:guess_number", "options": {"size": 60, "seed": 0}},
        "env": {
            "name": "guess_number",
            "options": {"low": 1, "high": 8, "guesses": 3},
            "max_turns": 3,
            "max_tokens": 200,
        },
        "rewards": [],
        "rollout": {"max_new_tokens": 8, "prefix_cache": True},
    },
    "asynchronous": {"rollout": {"staleness": 2}, "algorithm": {"kl": {"coefficient": 0.01}}},
    "lora": {"adapter": {"rank": 4}},
}


def replayed_config(kind: str, model: Path, run_dir: Path, steps: int, **changes: Any) -> Config:
    """A run of one of the kinds with the default retention: a checkpoint every 50 steps, of which
    two are kept.
    """
    config: dict[str, Any] = {
        "model": {"path": str(model)},
        "algorithm": {"name": "grpo", "group_size": 4},
        "data": {"source": "arithmetic:chain", "options": {"size": 60, "max_value": 9, "terms": 2}},
        "rewards": [{"name": "helpers.toy_rewards:odd"}],
        "rollout": {"max_new_tokens": 12},
        "train": {
            "steps": steps,
            "prompts_per_step": 4,
            "learning_rate": 3e-3,
            "schedule": {"kind": "cosine", "warmup": 2},
        },
        "run": {"dir": str(run_dir)},
    }
    own = KINDS[kind]
    config |= {"data": own.get("data", config["data"])}
    return config_from_dict(merged(merged(config, own), changes))
