"""Every configuration that we show anywhere loads: the recipes, and the YAML in the README and the
documentation.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.doc_snippets import snippets
from helpers.source_tree import ROOT
from reinforge.config.explain import all_keys
from reinforge.config.load import config_from_dict, load_config
from reinforge.config.pipeline import Pipeline, Stage, load_any
from reinforge.config.reference import reference_markdown
from reinforge.config.rules.page import compatibility_markdown
from reinforge.config.schema import Config
from reinforge.config.sweep import read_sweep

RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
SNIPPETS = list(snippets("yaml"))


def around(fragment: dict[str, Any]) -> dict[str, Any]:
    """A fragment of a configuration, completed with the least that a run needs."""
    base: dict[str, Any] = {
        "model": {"path": "some/model"},
        "algorithm": {"name": "grpo"},
        "data": {"source": "arithmetic:sum"},
        "rewards": [{"name": "exact_number"}],
        "train": {"steps": 1},
        "run": {"dir": "runs/snippet"},
    }
    for section, value in fragment.items():
        base[section] = (
            {**base[section], **value}
            if isinstance(value, dict) and isinstance(base.get(section), dict)
            else value
        )
    if "epochs" in fragment.get("train", {}):
        base["train"].pop("steps", None)
    return base


def load_stage(pipeline: Pipeline, stage: Stage) -> Config:
    return stage.config(lambda reference: str(pipeline[reference.stage].dir / "model"))


def test_there_are_recipes_and_snippets() -> None:
    assert RECIPES, "recipes/ is empty"
    assert len(SNIPPETS) >= 90


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_recipe_loads(path: Path) -> None:
    found = load_any(path)
    configs = (
        [load_stage(found, stage) for stage in found.stages if stage.kind != "export"]
        if isinstance(found, Pipeline)
        else [found]
    )
    for config in configs:
        assert isinstance(config, Config)
        assert not Path(config.run.dir).is_absolute(), (
            "a recipe writes below the directory it is started in"
        )


@pytest.mark.parametrize("text", [s.text for s in SNIPPETS], ids=map(str, SNIPPETS))
def test_snippet_loads(text: str, tmp_path: Path) -> None:
    """A block with every required section is loaded as it stands; a fragment is completed first."""
    keys = yaml.safe_load(text).keys()
    if "stages" in keys:
        (tmp_path / "pipeline.yaml").write_text(text)
        found = load_any(tmp_path / "pipeline.yaml")
        assert isinstance(found, Pipeline) and all(
            load_stage(found, s) for s in found.stages if s.kind != "export"
        )
        return
    if "over" in keys:
        (tmp_path / "sweep.yaml").write_text(text)
        sweep = read_sweep(tmp_path / "sweep.yaml", [], {})
        assert {tuple(key.split(".")) for key in sweep.over} <= {path for path, _ in all_keys()}
        return
    assert keys <= Config.model_fields.keys(), (
        f"unknown sections {keys - Config.model_fields.keys()}"
    )
    if {"model", "algorithm", "data", "train", "run"} <= keys:
        (tmp_path / "config.yaml").write_text(text)
        assert isinstance(load_config(tmp_path / "config.yaml"), Config)
    else:
        from reinforge.config.strict import parse

        assert isinstance(config_from_dict(around(parse(text, "snippet")[0])), Config)


@pytest.mark.parametrize(
    ("name", "markdown"),
    [("config.md", reference_markdown), ("compatibility.md", compatibility_markdown)],
)
def test_the_reference_pages_are_fresh(name: str, markdown: Callable[[], str]) -> None:
    page = ROOT / "docs" / "reference" / name
    assert page.read_text(encoding="utf-8") == markdown().rstrip("\n") + "\n", (
        "run `make reference`"
    )
