"""A small model that knows a little: where the recipes of the algorithms start from."""

from __future__ import annotations

import tempfile
from pathlib import Path

from reinforge.build.run import train_config
from reinforge.config.load import config_from_dict
from reinforge.loops.view import NoView, ViewLike
from reinforge.models.tiny import make_tiny_model
from reinforge.offline.export import export


def make_taught_model(
    path: str | Path,
    *,
    seed: int = 0,
    steps: int = 250,
    context: int = 256,
    view: ViewLike | None = None,
    architecture: str = "llama",
) -> Path:
    """The model that recipes/algorithms start from, in seconds on a CPU: 0.1 M parameters, taught
    sums of three digits by demonstrations of which two in five forget the last number. A Llama gets
    about a fifth of them right. `view` is shown the run that teaches it; its directory is gone
    afterwards.
    """
    with tempfile.TemporaryDirectory(prefix="reinforge-tiny-") as folder:
        model = make_tiny_model(
            Path(folder) / "model",
            seed=seed,
            width=64,
            layers=2,
            heads=4,
            kv_heads=2,
            spread=0.08,
            context=context,
            architecture=architecture,
        )
        options = {
            "terms": 3,
            "max_value": 9,
            "operators": "+",
            "size": 4000,
            "seed": seed,
            "sloppy": 0.4,
        }
        run = train_config(
            config_from_dict(
                {
                    "model": {"path": str(model), "device": "cpu"},
                    "algorithm": {"name": "sft"},
                    "data": {"source": "arithmetic:chain", "options": options},
                    "train": {
                        "steps": steps,
                        "prompts_per_step": 64,
                        "learning_rate": 4e-3,
                        "schedule": {"kind": "cosine", "warmup": 10},
                    },
                    "run": {
                        "dir": str(Path(folder) / "sft"),
                        "seed": seed,
                        "checkpoint": {"every": 0},
                    },
                },
                where="tiny",
            ),
            view=view or NoView(),
        )
        return export(run.run_dir, Path(path), parent="random weights")
