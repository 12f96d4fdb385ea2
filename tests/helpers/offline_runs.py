"""Whole runs on given rows with a small random model: pairs, judged answers, graded answers.

Everything is the ordinary path.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers.toys import SilentView
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.run import train_config
from reinforge.config.load import config_from_dict
from reinforge.config.schema import Config
from reinforge.models.tiny import make_tiny_model

WORDS = ["ape", "bee", "cat", "dog", "elk", "fox", "gnu", "hen", "jay", "kid", "owl", "pig"]
PAIRS: list[dict[str, Any]] = [
    {
        "prompt": f"{n} {w}:",
        "chosen": w.upper() + "!" * (n % 2),
        "rejected": w + "?" * (n % 3),
        "score_chosen": 2.0,
        "score_rejected": 0.5,
        "margin": 1.0,
    }
    for n, w in enumerate(WORDS)
]
HELD: list[dict[str, Any]] = [{**row, "prompt": f"9 {row['prompt']}"} for row in PAIRS[:4]]
JUDGED: list[dict[str, Any]] = [
    {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
    for row in PAIRS
    for side in ("chosen", "rejected")
]


def small_model(folder: Path) -> str:
    return str(
        make_tiny_model(
            folder / "model", width=32, layers=1, heads=2, kv_heads=1, context=64, spread=0.1
        )
    )


def config(
    model: str,
    folder: Path,
    name: str,
    *overrides: str,
    steps: int = 3,
    lr: float = 1e-2,
    **sections: Any,
) -> Config:
    algorithm = {"name": name, **sections.pop("algorithm", {})}
    return config_from_dict(
        {
            "model": {"path": model, "device": "cpu"},
            "algorithm": algorithm,
            "data": {"source": "python"},
            "train": {
                "steps": steps,
                "prompts_per_step": 6,
                "learning_rate": lr,
                **sections.pop("train", {}),
            },
            "run": {"dir": str(folder), "checkpoint": {"every": 0}, "log": {"samples_every": 0}},
            **sections,
        },
        overrides=overrides,
    )


def launch(cfg: Config, data: list[Any], held: list[Any] | None = None) -> SilentView:
    view = SilentView()
    train_config(cfg, CallerObjects(data=data, eval_data=held), view)
    return view
