"""Runs whose engine differs from the trainer in one thing, for tests and benchmarks/mismatch.py."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers.cli_runs import merged
from helpers.planted_engines import Plant, planted
from helpers.toy_architectures import save_architecture, write_tokenizer
from reinforge.build.mismatch import MismatchReport, explain_mismatch, plan_mismatch
from reinforge.build.run import train_config
from reinforge.config.load import config_from_dict
from reinforge.loops.view import NoView
from reinforge.models.tiny import make_tiny_model


@dataclass(frozen=True)
class MismatchedRun:
    """One difference: how it is made, and what `runs mismatch` is to call it; None: nothing."""

    told: str
    cause: str | None
    plant: Plant | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    experts: bool = False
    stays: bool = False  # the engine that is looked at later has it too


RUNS: dict[str, MismatchedRun] = {
    "healthy": MismatchedRun("nothing", None),
    "copy": MismatchedRun("nothing; the engine has a copy of the weights", None, Plant()),
    "dtype": MismatchedRun(
        "the engine's copy is in bfloat16, the trainer in float32", "dtype", Plant(dtype="bfloat16")
    ),
    "fp8": MismatchedRun("rollout.precision=fp8", "dtype", None, {"rollout": {"precision": "fp8"}}),
    "temperature": MismatchedRun(
        "the engine tells log-probs of temperature 1, rollout.temperature is 0.7",
        "temperature",
        Plant(temperature=1.0),
        {"rollout": {"temperature": 0.7}},
    ),
    "template": MismatchedRun(
        "the engine puts a BOS before every prompt", "template", Plant(bos=True)
    ),
    "stale": MismatchedRun(
        "the engine's weights are one update behind", "stale weights", Plant(behind=1)
    ),
    "never updated": MismatchedRun(
        "one layer of the engine never gets new weights",
        "stale weights",
        Plant(left_out="layers.1."),
    ),
    "routing": MismatchedRun(
        "routers of the engine with 3 bits of mantissa",
        "routing",
        Plant(router_bits=3),
        {"train": {"router_replay": "count"}},
        experts=True,
    ),
    "cache": MismatchedRun(
        "rollout.cache_precision=fp8", "dtype", None, {"rollout": {"cache_precision": "fp8"}}
    ),
    "operation": MismatchedRun(
        "one product of the engine with 4 bits of mantissa",
        "numerics",
        Plant(rounded="layers.1.mlp.down_proj"),
        stays=True,
    ),
    "staleness": MismatchedRun(
        "rollout.staleness=2", "staleness", None, {"rollout": {"staleness": 2}}
    ),
}


def make_models(folder: Path) -> Path:
    """A dense model and a mixture of experts."""
    make_tiny_model(folder / "dense", width=32, layers=2, heads=4, spread=0.1)
    save_architecture("qwen3_moe", folder / "experts", write_tokenizer)
    return folder


def mismatched_run(name: str, models: Path, run_dir: Path, **changes: Any) -> Path:
    """Trains the run of this name."""
    run = RUNS[name]
    config: dict[str, Any] = {
        "model": {"path": str(models / ("experts" if run.experts else "dense"))},
        "algorithm": {"name": "grpo", "group_size": 4},
        "data": {"source": "arithmetic:chain", "options": {"size": 60, "max_value": 9, "terms": 2}},
        "rewards": [{"name": "helpers.toy_rewards:odd"}],
        "rollout": {"max_new_tokens": 8},
        "train": {"steps": 4, "prompts_per_step": 4, "learning_rate": 3e-3},
        "run": {"dir": str(run_dir), "keep_rollouts": True},
    }
    made = config_from_dict(merged(merged(config, run.changes), changes))
    with nullcontext() if run.plant is None else planted(run.plant):
        train_config(made, view=NoView())
    return run_dir


def judged(name: str, run_dir: Path, samples: int = 16, step: int | None = None) -> MismatchReport:
    """What `runs mismatch` says of the run of this name."""
    run = RUNS[name]
    with planted(run.plant) if run.stays and run.plant is not None else nullcontext():
        return explain_mismatch(plan_mismatch(run_dir, step), samples=samples)
