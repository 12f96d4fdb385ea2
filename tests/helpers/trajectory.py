"""The reference trajectory: ten steps of a small run whose numbers and digests are in the
repository (tests/data/trajectory). tools/record_trajectory.py records it.
"""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import torch

from helpers.cli_runs import lines
from reinforge.build.run import train_config
from reinforge.config.load import config_from_dict
from reinforge.loops.view import NoView
from reinforge.models.tiny import make_tiny_model
from reinforge.watch.past import read_anchors

STORED = Path(__file__).parents[1] / "data" / "trajectory"
RECORD = STORED / "trajectory.json"
STEPS = 10
NUMBERS = ("train/loss", "train/grad_norm", "policy/entropy", "policy/kl", "reward/mean")
DIGESTS = ("samples", "update", "weights")


def cpu_kind() -> str:
    """What the bits of a run depend on: the CPU, what torch uses of it, and torch."""
    names = ("model name", "CPU implementer", "CPU part")
    cpuinfo = Path("/proc/cpuinfo")
    told = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    parts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in told)}
    model = " ".join(parts[name] for name in names if name in parts)
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{platform.machine()} {model} {capability} torch {torch.__version__}"


def run_trajectory(folder: Path, kept: Path | None = None) -> list[dict[str, Any]]:
    """Ten steps, with one thread: the numbers and the digests of each. `kept`: on the rollouts of
    that run, with nothing generated.
    """
    model = make_tiny_model(folder / "model", width=16, layers=2, heads=2, context=64)
    config = {
        "model": {"path": str(model), "device": "cpu"},
        "algorithm": {"name": "grpo", "group_size": 4, "kl": {"coefficient": 0.05}},
        "data": {"source": "arithmetic:chain", "options": {"size": 30, "max_value": 9, "terms": 2}},
        "rewards": [{"name": "helpers.toy_rewards:odd"}],
        "rollout": {"max_new_tokens": 8, **({} if kept is None else {"kept": str(kept)})},
        "train": {
            "steps": STEPS,
            "prompts_per_step": 2,
            "learning_rate": 3e-3,
            # without it a gradient of nothing but rounding would move a weight as far as any other
            "optimizer": {"eps": 1e-3},
        },
        "run": {"dir": str(folder / "run"), "keep_rollouts": kept is None},
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        train_config(config_from_dict(config), view=NoView())
    finally:
        torch.set_num_threads(threads)
    anchors = read_anchors(folder / "run")
    metrics = {
        line["step"]: line
        for line in lines(folder / "run" / "metrics.jsonl")
        if "train/grad_norm" in line
    }
    return [
        {
            "step": step,
            **{name: metrics[step][name] for name in NUMBERS},
            **{name: anchors[step][name] for name in DIGESTS},
        }
        for step in range(1, STEPS + 1)
    ]


def stored() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORD.read_text())
    return found
