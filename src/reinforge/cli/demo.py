"""`reinforge demo`: from nothing to a model that learned, on a laptop CPU, in a few minutes.

A small model, a Llama unless another architecture is asked for, is made from random numbers. SFT
teaches it sums of four to six digits from demonstrations by sloppy teachers: three in five forget
the last number. It imitates them, mistakes included. Then GRPO lets it try for itself on fresh
problems, with no demonstrations, only a check of the answer, and it unlearns the mistake. Held-out
problems occur in neither.
"""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path
from typing import Any

from reinforge.algorithms.catalogue import spec_of
from reinforge.build.result import RunResult
from reinforge.build.run import train_config
from reinforge.config.load import config_from_dict
from reinforge.core.errors import InputError
from reinforge.core.this_command import this_command
from reinforge.evals.statistics import wilson
from reinforge.models.tiny import make_tiny_model
from reinforge.offline.export import export
from reinforge.watch.runs import read_lines

TASK = {"terms": [4, 6], "max_value": 9, "operators": "+"}
SIZES: dict[str, dict[str, Any]] = {
    "full": {
        "width": 128,
        "layers": 4,
        "demonstrations": 8000,
        "sft_steps": 600,
        "rl_steps": 260,
        "prompts": 64,
        "held_out": 512,
    },
    "quick": {
        "width": 64,
        "layers": 2,
        "demonstrations": 1000,
        "sft_steps": 40,
        "rl_steps": 4,
        "prompts": 16,
        "held_out": 64,
    },
}


def _config(
    folder: Path,
    name: str,
    model: Path,
    algorithm: dict[str, Any],
    options: dict[str, Any],
    size: dict[str, Any],
    train: dict[str, Any],
    seed: int,
) -> Any:
    held_out = {
        "source": "arithmetic:chain",
        "size": size["held_out"],
        "options": {**TASK, "split": "eval", "seed": seed},
    }
    return config_from_dict(
        {
            "model": {"path": str(model), "device": "cpu"},
            "algorithm": algorithm,
            "rewards": [{"name": "exact_number"}],
            "data": {
                "source": "arithmetic:chain",
                "options": {**TASK, "seed": seed, **options},
                "eval": held_out,
            },
            "rollout": {"max_new_tokens": 6},
            "train": train,
            "eval": {
                "every": max(1, train["steps"] // 4),
                "at_start": spec_of(algorithm["name"]).kind.samples,
            },
            "run": {
                "dir": str(folder / name),
                "seed": seed,
                "checkpoint": {"every": 0},
                "log": {"samples_every": max(1, train["steps"] // 3)},
            },
        },
        where="demo",
    )


def run_demo(
    dir: Path, seed: int = 0, quick: bool = False, architecture: str = "llama"
) -> dict[str, Any]:
    """Makes the model, trains it twice, and writes summary.json with both held-out accuracies."""
    start = time.monotonic()
    size = SIZES["quick" if quick else "full"]
    folder = Path(dir)
    if (folder / "summary.json").exists():
        raise InputError(
            f"{folder} already holds a demo.", where="demo", fix="Give another --dir, or delete it."
        )
    model = folder / "model"
    # otherwise this is a demo that was stopped, and goes on
    if not (model / "config.json").exists():
        make_tiny_model(
            model,
            seed=seed,
            width=size["width"],
            layers=size["layers"],
            heads=4,
            kv_heads=2,
            spread=0.08,
            architecture=architecture,
        )
    print(f"1/3  a {architecture} of {_millions(model):.1f} M parameters, made from random numbers")
    print(
        f"2/3  SFT on {size['demonstrations']} demonstrations by sloppy teachers: three in five"
        " forget the last number"
    )
    sft = train_config(
        _config(
            folder,
            "sft",
            model,
            {"name": "sft"},
            {"size": size["demonstrations"], "sloppy": 0.6},
            size,
            {
                "steps": size["sft_steps"],
                "prompts_per_step": 128,
                "learning_rate": 2e-3,
                "schedule": {"kind": "cosine", "warmup": 20},
            },
            seed,
        )
    )
    start_from = folder / "sft-model"
    if not start_from.exists():
        export(sft.run_dir, start_from)
    print("3/3  GRPO on fresh problems: no demonstrations, only a check of the answer")
    rl = train_config(
        _config(
            folder,
            "grpo",
            start_from,
            {"name": "grpo", "group_size": 8},
            {"size": 20000, "seed": seed + 1_000_000},
            size,
            {"steps": size["rl_steps"], "prompts_per_step": size["prompts"], "learning_rate": 1e-4},
            seed,
        )
    )
    summary = _summary(sft, rl, time.monotonic() - start, seed)
    (folder / "summary.json").write_text(json.dumps(summary, indent=1))
    _tell(summary, rl, folder)
    return summary


def _millions(model: Path) -> float:
    """Parameters, in float32."""
    return sum(file.stat().st_size for file in model.glob("*.safetensors")) / 4e6


def _summary(sft: RunResult, rl: RunResult, seconds: float, seed: int) -> dict[str, Any]:
    n = int(rl.metrics["eval/n"])
    out: dict[str, Any] = {
        "n": n,
        "seconds": round(seconds, 1),
        "seed": seed,
        "report": str(rl.report),
    }
    for name, result in (("sft", sft), ("rl", rl)):
        accuracy = result.metrics["eval/accuracy"]
        out[f"{name}_accuracy"] = accuracy
        out[f"{name}_interval"] = [round(x, 6) for x in wilson(accuracy * n, n)]
    return out


def _tell(summary: dict[str, Any], rl: RunResult, folder: Path) -> None:
    print()
    for name, label in (("sft", "after SFT "), ("rl", "after GRPO")):
        low, high = summary[f"{name}_interval"]
        print(
            f"{label}  {summary[f'{name}_accuracy']:.1%} of {summary['n']} held-out problems  (95%"
            f" interval {low:.1%} to {high:.1%})"
        )
    print("\nanswers during GRPO (step, reward, problem and answer):")
    samples = list(read_lines(rl.run_dir / "samples.jsonl"))
    for sample in samples[:3] + samples[-3:]:
        text = (sample["prompt"] + sample["completion"]).replace("\n", " ")
        print(f"  {sample['step']:3d}  {sample['reward']:.0f}  {text}")
    print(
        f"\nreport   {summary['report']}\nsummary  {folder / 'summary.json'}\nseconds "
        f" {summary['seconds']}\nlook     {this_command()} ui {shlex.quote(str(folder))}"
    )
