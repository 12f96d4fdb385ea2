"""The configuration of a first run, from a model and a file of rows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reinforge.config.load import config_from_dict
from reinforge.config.schema import Config
from reinforge.core.errors import InputError
from reinforge.data.readers import read, size_of

MOST_HELD_OUT, SHARE, FEWEST = 200, 20, 40  # one row in SHARE is held out, of a file with at least FEWEST rows


def sft_config(model: str, data: str, *, out: str | None = None, epochs: float = 1.0, lora: int | None = None, overrides: Sequence[str] = ()) -> Config:  # fmt: skip
    """SFT with settings that suit most: a twentieth of the rows (at most 200) held out, 16 rows per step, cosine with warm-up, 1e-5 for
    all weights and 2e-4 for an adapter. `overrides` are those of `reinforge train`."""
    rows = size_of(data, {}) or sum(1 for _ in read(data))
    held_out = min(MOST_HELD_OUT, rows // SHARE) if rows >= FEWEST else 0
    tree: dict[str, Any] = {
        "model": {"path": model},
        "algorithm": {"name": "sft"},
        "data": {"source": data, "eval": {"size": held_out}},
        "rewards": [],
        "train": {
            "epochs": epochs,
            "prompts_per_step": max(1, min(16, (rows - held_out) // 4)),
            "learning_rate": 2e-4 if lora else 1e-5,
            "schedule": {"kind": "cosine", "warmup": 3, "floor": 0.1},
        },
        "run": {"dir": out or f"runs/sft-{_slug(model)}-{_slug(Path(data).stem)}"},
    }
    if any(override.startswith("train.steps=") for override in overrides):
        del tree["train"]["epochs"]  # one of the two says how long
    if lora:
        tree["adapter"] = {"rank": lora}
    if not rows:
        raise InputError("there are no rows.", where=data, fix="Give a file with at least one row.")
    return config_from_dict(tree, overrides=list(overrides))


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", Path(text).name.lower()).strip("-") or "run"
