"""Files for public CI, hooks and templates: they parse, and call what there is."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from helpers.source_tree import ROOT
from reinforge.config.strict import parse

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
PAGES = [ROOT / name for name in ("CONTRIBUTING.md", "docs/releasing.md", "README.md")]


def load(path: Path) -> dict[str, Any]:
    data, _ = parse(path.read_text(encoding="utf-8"), path.name)
    assert isinstance(data, dict)
    return data


def commands(workflow: dict[str, Any]) -> list[str]:
    return [
        step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step
    ]


def targets_of(command: str) -> list[str]:
    """What `make ... target NAME=value` builds."""
    words = shlex.split(command)
    if "make" not in words:
        return []
    return [word for word in words[words.index("make") + 1 :] if "=" not in word]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_parses_and_calls_targets_that_exist(path: Path) -> None:
    workflow = load(path)
    assert {"name", "on", "permissions", "jobs"} <= workflow.keys()
    assert workflow["permissions"] == {"contents": "read"}
    called = [target for command in commands(workflow) for target in targets_of(command)]
    assert called and set(called) <= TARGETS, set(called) - TARGETS
    for name, job in workflow["jobs"].items():
        assert job["timeout-minutes"] <= 180, name
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)


def test_public_ci_runs_what_ci_runs() -> None:
    run = (ROOT / ".ci/run").read_text()
    ours = set(re.findall(r"^\s*(?:step|if ! step|beside) \d+ (test[a-z-]*)", run, re.MULTILINE))
    called = {t for path in WORKFLOWS for c in commands(load(path)) for t in targets_of(c)}
    assert {"test", "test-scale"} <= called
    assert {"docs", "test-long", "test-resolution", "release"} <= called
    assert ours <= called


def test_hooks_call_tools_of_the_environment() -> None:
    hooks = [
        hook for repo in load(ROOT / ".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]
    ]
    assert [hook["id"] for hook in hooks] == ["ruff-check", "ruff-format", "mypy"]
    for hook in hooks:
        python, dash, module, *_ = shlex.split(hook["entry"])
        assert (python, dash, hook["language"]) == (".venv/bin/python", "-m", "system")
        assert importlib.util.find_spec(module) is not None
        assert f"-m {module}" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_a_form_parses(path: Path) -> None:
    form = load(path)
    if path.name == "config.yml":
        assert form == {"blank_issues_enabled": True}
        return
    assert {"name", "description", "body"} <= form.keys()
    names = [field["id"] for field in form["body"]]
    assert len(names) == len(set(names)) and all(
        field["attributes"]["label"] for field in form["body"]
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_make_targets_of_pages_exist(page: Path) -> None:
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), re.MULTILINE))
    assert named and named <= TARGETS, named - TARGETS
