"""The notebooks run from a clean clone, learn what they say, and are what their sources say.

Each asserts its own numbers in its last cells; `accuracy > before + 0.1` and the like, with margins
that four seeds support. They share the small model, which takes half a minute to make.
"""

from __future__ import annotations

import re
import shutil
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from filelock import FileLock

from helpers.paths import ROOT
from reinforge.offline.starter_model import make_taught_model


def _tool() -> ModuleType:
    """tools/notebooks.py."""
    spec = spec_from_file_location("notebooks", ROOT / "tools" / "notebooks.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOOL = _tool()
SOURCES = TOOL.sources()
LONG = ("3_own_environment", "5_distillation", "6_not_learning")  # the others run everywhere
TAKEN = {"1_first_rl_run", "2_own_reward", "4_dpo", "5_distillation", "6_not_learning"}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that `reinforge tiny` makes: once for all processes of the tests."""
    folder = tmp_path_factory.getbasetemp().parent
    with FileLock(folder / "notebooks-tiny.lock"):
        if not (folder / "notebooks-tiny").exists():
            make_taught_model(folder / "notebooks-tiny-part")
            (folder / "notebooks-tiny-part").rename(folder / "notebooks-tiny")
    return folder / "notebooks-tiny"


def outputs(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [out for cell in notebook["cells"] for out in cell.get("outputs", ())]


def pages(notebook: dict[str, Any]) -> list[str]:
    """What the runs of a notebook showed."""
    found = [out.get("data", {}).get("text/html", "") for out in outputs(notebook)]
    return [page for page in found if "data:image/svg+xml" in page]


def test_there_are_six() -> None:
    assert len(SOURCES) == 6
    assert [path.name for path in SOURCES] == sorted(path.name for path in SOURCES)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_a_committed_notebook_is_what_its_source_says(source: Path) -> None:
    committed = TOOL.read(source.with_suffix(".ipynb"))
    wanted = TOOL.notebook(source)
    found = [(cell["cell_type"], cell["source"]) for cell in committed["cells"]]
    assert found == [(cell["cell_type"], cell["source"]) for cell in wanted["cells"]], (
        "run tools/notebooks.py"
    )
    kinds = {(out["output_type"], out.get("name", "stdout")) for out in outputs(committed)}
    assert not {kind for kind in kinds if "stderr" in kind or "error" in kind}
    assert pages(committed) and "<script" not in "".join(pages(committed))
    text = "".join(cell["source"] for cell in wanted["cells"] if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links and all((source.parent / link).exists() for link in links)


@pytest.mark.parametrize(
    "source",
    [pytest.param(path, marks=pytest.mark.long) if path.stem in LONG else path for path in SOURCES],
    ids=lambda path: path.stem,
)
def test_a_notebook_runs(source: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """In a kernel of its own, in an empty folder. Takes more than ten seconds: it trains until a
    curve rises.
    """
    if source.stem in TAKEN:
        shutil.copytree(request.getfixturevalue("tiny"), tmp_path / "runs" / "tiny")
    made = TOOL.executed(TOOL.notebook(source), tmp_path)
    runs = list((tmp_path / "runs").glob("*/report.html"))
    assert len(pages(made)) == len(runs) > 0  # one output for each run, however many steps
    for page in pages(made):
        assert re.search(r"step (\d+) of \1\b", page), "the last state is the one that is kept"
