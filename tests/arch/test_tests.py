"""Where tests lie: beside the package that they test, under names that are used once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from helpers.paths import ROOT, TESTS
from helpers.source_tree import PACKAGE

BESIDE_SRC = {"benchmarks", "tools"}  # folders of the repository that have unit tests too


def files() -> list[Path]:
    return sorted(TESTS.rglob("test_*.py"))


def test_unit_tests_are_in_the_folder_of_their_package() -> None:
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    folders = {path.name for path in (TESTS / "unit").iterdir() if list(path.glob("test_*.py"))}
    assert folders <= packages | BESIDE_SRC, folders - packages - BESIDE_SRC
    assert all((ROOT / name).is_dir() for name in BESIDE_SRC)
    modules = tuple(f"test_{path.stem}" for path in PACKAGE.glob("[a-z]*.py"))
    above = [path.name for path in (TESTS / "unit").glob("test_*.py")]
    assert [name for name in above if not name.startswith(modules)] == []


def test_a_name_is_used_once() -> None:
    """Files of tests are imported by their name alone."""
    names = Counter(path.name for path in files())
    assert [name for name, times in names.items() if times > 1] == []


def test_what_tests_share_is_in_helpers() -> None:
    """Parity tests keep what they compare with beside them: other libraries' Pythons run it. What
    lies in data/ is read, and never run.
    """
    shared = {
        path.relative_to(TESTS).as_posix()
        for path in TESTS.rglob("*.py")
        if not path.name.startswith("test_") and path.name != "conftest.py"
    }
    assert [
        name for name in sorted(shared) if not name.startswith(("helpers/", "parity/", "data/"))
    ] == []
