"""The configuration of a first run, from a model and a file of rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from reinforge.config.load import config_from_dict
from reinforge.config.schema import Config
from reinforge.data.readers import GENERATED, kind_of
from reinforge.data.sources import held_out, load_rows

# one row in SHARE is held out, of a file with at least FEWEST rows
MOST_HELD_OUT = 200
SHARE = 20
FEWEST = 40


def sft_config(
    model: str,
    data: str,
    *,
    out: str | None = None,
    epochs: float = 1.0,
    lora: int | None = None,
    learning_rate: float | None = None,
    batch_size: int | None = None,
    overrides: Sequence[str] = (),
    say: Callable[[str], None] = lambda text: None,
) -> Config:
    """SFT with settings that suit most: a twentieth of the rows (at most 200) held out, 16 rows per
    step, cosine with warm-up, 1e-5 for all weights and 2e-4 for an adapter. `batch_size`: rows per
    step. `overrides` are those of `reinforge train`. `say` is told where fewer rows are held out,
    because rows with the same prompt stay together.
    """
    usual = 2e-4 if lora else 1e-5
    tree: dict[str, Any] = {
        "model": {"path": model},
        "algorithm": {"name": "sft"},
        "data": {"source": data},
        "rewards": [],
        "train": {
            "epochs": epochs,
            "learning_rate": usual if learning_rate is None else learning_rate,
            "schedule": {"kind": "cosine", "warmup": 3, "floor": 0.1},
        },
        "run": {"dir": out or f"runs/sft-{_slug(model)}-{_slug(Path(data).stem)}"},
    }
    if any(override.startswith("train.steps=") for override in overrides):
        del tree["train"]["epochs"]  # one of the two says how long
    if lora:
        tree["adapter"] = {"rank": lora}
    cfg = config_from_dict(tree, overrides=list(overrides)).data
    rows = load_rows(cfg, [])  # what is to be told of them the run tells
    size = min(MOST_HELD_OUT, len(rows) // SHARE) if len(rows) >= FEWEST else 0
    if kind_of(data) not in GENERATED:
        wanted = size
        size = len(held_out(rows, size, cfg.eval.where))
        # else it was asked for
        if size < wanted and cfg.eval.size == 0 and cfg.eval.source is None:
            say(
                f"{size} rows are held out instead of {wanted}: rows with the same prompt stay"
                " together."
            )
    tree["data"]["eval"] = {"size": size}
    tree["train"]["prompts_per_step"] = batch_size or max(1, min(16, (len(rows) - size) // 4))
    return config_from_dict(tree, overrides=list(overrides))


def described(config: Config) -> str:
    """The settings of `sft_config` in a sentence, so that one knows what to change."""
    train = config.train
    what = "all weights" if config.adapter is None else f"an adapter of rank {config.adapter.rank}"
    if train.epochs is None:
        long = f"{train.steps} steps"
    else:
        long = "1 epoch" if train.epochs == 1 else f"{train.epochs:g} epochs"
    return (
        f"training {what} for {long}, {train.prompts_per_step} rows a step, learning rate"
        f" {train.learning_rate:g} ({train.schedule.kind}), {config.data.eval.size or 'no'} rows"
        f" held out, in {config.run.dir}"
    )


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", Path(text).name.lower()).strip("-") or "run"
