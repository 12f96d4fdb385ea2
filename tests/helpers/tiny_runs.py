"""Whole runs on the tiny model, in-process: their settings, how to start them and how to read what
they left.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from helpers.toy_rewards import odd
from helpers.toys import SilentView
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.result import RunResult
from reinforge.build.run import train_config
from reinforge.checkpoint import store
from reinforge.config.load import config_from_dict
from reinforge.config.schema import Config

DATA = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(16)]
EVAL = [{"prompt": f"{i}*{i}=", "answer": str(i * i)} for i in range(10, 14)]


def launch(
    cfg: Config,
    reward: Callable[..., Any] = odd,
    *,
    data: list[Any] = DATA,
    eval_data: list[Any] | None = None,
) -> RunResult:
    sft = cfg.algorithm.name == "sft"
    rows = [{"prompt": d["prompt"], "completion": d["answer"]} for d in data] if sft else data
    held = (
        [{"prompt": d["prompt"], "completion": d["answer"]} for d in eval_data or ()]
        if sft
        else eval_data
    )
    return train_config(
        cfg,
        CallerObjects(data=rows, eval_data=held or None, rewards=None if sft else [reward]),
        SilentView(),
    )


def lines(cfg: Config, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(cfg.run.dir) / name).read_text().splitlines()]


def digest(cfg: Config) -> str:
    return store.digest_run(Path(cfg.run.dir))


def tensors(cfg: Config) -> dict[str, torch.Tensor]:
    newest = store.latest(Path(cfg.run.dir))
    assert newest is not None
    return store.load(newest)[0].tensors


LORA = {"adapter": {"kind": "lora", "rank": 4}}


def make_config(
    model: str,
    folder: Path,
    name: str = "run",
    algorithm: str = "grpo",
    *overrides: str,
    **sections: Any,
) -> Config:
    raw: dict[str, Any] = {
        "model": {"path": model},
        "algorithm": {"name": algorithm, "group_size": 4},
        "data": {"source": "python"},
        "rewards": [] if algorithm == "sft" else [{"name": "helpers.toy_rewards:odd"}],
        "rollout": {"max_new_tokens": 8, "kv_gib": 0.01},
        "train": {"steps": 3, "prompts_per_step": 4, "learning_rate": 1e-3},
        "run": {"dir": str(folder / name), "checkpoint": {"every": 0}},
    }
    return config_from_dict({**raw, **sections}, overrides=overrides)
