"""What somebody gets who installs the package: recipes by name, a description without dead links,
bounded dependencies.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from helpers.paths import ROOT
from reinforge.config.load import load_config
from reinforge.config.pipeline import load_any
from reinforge.config.recipes import copy_recipes, recipe_names, recipe_text, recipes_dir
from reinforge.core.errors import InputError

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel and the source archive of this tree, built from a copy of it."""
    source = tmp_path_factory.mktemp("source")
    out = tmp_path_factory.mktemp("dist")
    for name in ("src", "recipes", "tests", "docs", "tools", "benchmarks", "deploy", ".ci"):
        shutil.copytree(
            ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy2(path, source / path.name)
    code = (
        f"import setuptools.build_meta as backend; print(backend.build_wheel({str(out)!r}));"
        f" print(backend.build_sdist({str(out)!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return out


def test_the_wheel_carries_every_recipe(built: Path, tmp_path: Path) -> None:
    """Unpacked elsewhere, `recipe:NAME` finds the files in the package, and what a recipe names
    lies beside it.
    """
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path)
    inside = {
        path.relative_to(tmp_path / "reinforge/recipes").as_posix()
        for path in (tmp_path / "reinforge/recipes").rglob("*.*")
    }
    here = {
        path.relative_to(ROOT / "recipes").as_posix() for path in (ROOT / "recipes").rglob("*.*")
    }
    assert inside == {name for name in here if "__pycache__" not in name}
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from reinforge.config.recipes import recipe_names, recipes_dir\n"
        "from reinforge.config.load import load_config\n"
        "config = load_config('recipe:agent_calculator')\n"
        "print(recipes_dir(), len(recipe_names()), config.agent.name)"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    root = tmp_path / "reinforge/recipes"
    assert said.split() == [
        str(root),
        str(len(recipe_names())),
        f"{root}/agents/calculator_agent.py:agent",
    ]


def test_the_source_archive_has_tests_and_pins(built: Path) -> None:
    (found,) = built.glob("*.tar.gz")
    with tarfile.open(found) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    wanted = {
        "constraints.txt",
        "Makefile",
        "tests/conftest.py",
        "recipes/chain_sum.yaml",
        "tools/env.sh",
        "docs/index.md",
    }
    assert wanted <= names


def test_the_description_has_no_link_into_the_repository(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
    metadata = message_from_bytes(archive.read(name))
    text = str(metadata.get_payload())
    assert "Quickstart (docs/quickstart.md)" in text
    assert re.findall(r"\]\((?!https?:|#)[^)]*\)", text) == []
    assert "Programming Language :: Python :: 3.11" in metadata.get_all("Classifier", [])


def test_every_dependency_has_a_lower_end_and_extras_of_moving_projects_an_upper_one() -> None:
    for needed in PROJECT["dependencies"]:
        assert ">=" in needed, f"{needed} would install its first release ever"
        assert "<" in needed or needed.startswith("pyarrow"), (
            f"{needed} would install a release that nobody has seen"
        )
    assert [extra for extra in PROJECT["optional-dependencies"]["mcp"] if "<3" in extra]


def test_recipes_have_names() -> None:
    assert "chain_sum" in recipe_names() and "algorithms/grpo" in recipe_names()
    assert (
        load_config(Path("recipe:algorithms/grpo")).model_dump()
        == load_config(ROOT / "recipes/algorithms/grpo.yaml").model_dump()
    )
    for name in recipe_names():
        load_any(Path(f"recipe:{name}"))
    with pytest.raises(InputError, match=r"no recipe 'grp0'.*reinforge recipes"):
        load_config(Path("recipe:grp0"))
    with pytest.raises(InputError, match="algorithms/grpo"):
        load_config(Path("recipe:grpo"))


def test_a_recipe_by_name_finds_the_files_beside_it() -> None:
    assert f"{recipes_dir()}/envs/guess_server.py" in recipe_text("recipe:envs/openenv")
    assert "reinforge train recipes/envs/openenv.yaml" in recipe_text("envs/openenv"), (
        "comments stay as they are"
    )


def test_recipes_are_copied_whole_and_never_over_something(tmp_path: Path) -> None:
    copy_recipes(tmp_path / "recipes")
    assert (tmp_path / "recipes/agents/calculator_agent.py").is_file()
    with pytest.raises(InputError, match="exists already"):
        copy_recipes(tmp_path / "recipes")


def test_one_version_of_torch_and_ray() -> None:
    """The image installs what constraints.txt pins, and the manifests ask for the Ray that is in
    it.
    """
    from reinforge.cluster.launchers.kubernetes import RAY_VERSION

    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line.startswith(("ray==", "torch=="))
    )
    image = (ROOT / "deploy/Dockerfile").read_text()
    assert pins["ray"] == RAY_VERSION
    assert not re.search(r"(torch|ray\S*)[=>]=?\s*\d", image), (
        "the image names no versions of its own"
    )
