"""The settings of data that a command names: of a configuration, or of a source alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from reinforge.config.load import config_from_dict
from reinforge.config.pipeline import Pipeline, load_any
from reinforge.config.schema import Config
from reinforge.core.errors import InputError

CONFIGS = (".yaml", ".yml")


def is_config(source: str) -> bool:
    return source.startswith("recipe:") or Path(source).suffix in CONFIGS


def source_config(
    source: str, overrides: Sequence[str] = (), *, model: str | None = None, where: str
) -> Config:
    """The configuration that `source` is, or one of SFT on a source. `where`: of what is wrong with
    the overrides.
    """
    if is_config(source):
        given = [f"model.path={model}"] if model is not None else []
        loaded = load_any(Path(source), [*overrides, *given])
        if isinstance(loaded, Pipeline):
            raise InputError(
                f"{source} is a pipeline, which has data in every stage.",
                where="SOURCE",
                fix="Give the data of one stage.",
            )
        return loaded
    tree = {
        "model": {"path": model or "none"},
        "algorithm": {"name": "sft"},
        "data": {"source": source},
        "rewards": [],
        "train": {"steps": 1},
        "run": {"dir": "runs/data"},
    }
    return config_from_dict(tree, where=where, overrides=overrides)
