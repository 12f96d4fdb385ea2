"""Every file of tests is found by pytest: it leaves folders out by their names, without a word."""

from __future__ import annotations

from fnmatch import fnmatch

import pytest

from helpers.paths import ROOT


def test_no_folder_of_tests_is_left_out(request: pytest.FixtureRequest) -> None:
    patterns = request.config.getini("norecursedirs")
    files = list((ROOT / "tests").rglob("test_*.py"))
    assert len(files) > 300 and patterns
    left_out = {
        str(folder.relative_to(ROOT))
        for file in files
        for folder in file.parents
        if folder.is_relative_to(ROOT / "tests")
        and any(fnmatch(folder.name, pattern) for pattern in patterns)
    }
    assert not left_out
