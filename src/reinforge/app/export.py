"""Out the door: a directory that transformers, peft and every serving engine load as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from reinforge.app.runs import checkpoint_of, is_run, load_weights
from reinforge.config.load import config_from_dict
from reinforge.core.errors import InputError
from reinforge.models.load import load_model


def export(run: Path, out: Path, *, checkpoint: str = "latest", merge: bool = False) -> Path:
    """Writes model (or adapter), tokenizer and a model card to `out`. `merge` folds the adapter into the weights."""
    if not is_run(run):
        raise InputError(f"{run} is not a run directory.", where="export", fix="Give the run.dir of a training run.")
    if out.exists() and any(out.iterdir()):
        raise InputError(f"{out} is not empty.", where="export", fix="Choose another directory, or empty it first.")
    config = config_from_dict(json.loads((run / "config.json").read_text()), where=str(run / "config.json"))
    model = load_model(config.model, config.adapter)
    load_weights(model, run, checkpoint)
    module: Any = model.module
    if merge and config.adapter is not None:
        module = module.merge_and_unload()
    model.causal.set_attn_implementation("sdpa")
    module.save_pretrained(out)
    model.tokenizer.save_pretrained(out)
    (out / "README.md").write_text(_card(run, config.algorithm.name, config.model.path, checkpoint_of(run, checkpoint).name))
    return out


def _card(run: Path, algorithm: str, base: str, checkpoint: str) -> str:
    summary = run / "summary.json"
    metrics = json.loads(summary.read_text())["metrics"] if summary.exists() else {}
    rows = "\n".join(f"| {name} | {value:.4g} |" for name, value in sorted(metrics.items()) if name.startswith(("eval/", "reward/")))
    return (f"---\nbase_model: {base}\nlibrary_name: transformers\ntags: [reinforge, {algorithm}]\n---\n# Trained with reinforge\n\n"
            f"`{algorithm}` from `{base}`, {checkpoint}.\n\n| metric | value |\n|---|---|\n{rows}\n")  # fmt: skip
