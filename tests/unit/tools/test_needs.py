"""A test that had to run and was skipped is a failure; other skips are counted by reason."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.paths import TESTS

INSIDE = """
import pytest
from helpers import needs

def test_skips_itself():
    needs.missing("browser", "no chromium on the PATH")

@needs.unless(False, "sandbox", "no bwrap")
def test_marked():
    raise AssertionError

@pytest.fixture
def contained():
    needs.missing("sandbox", "no bwrap")

def test_skipped_by_a_fixture(contained):
    raise AssertionError

@pytest.mark.skip(reason="a browser: in the middle of a reason it is not a name")
def test_for_another_reason():
    raise AssertionError

@pytest.mark.xfail(reason="browser: known")
def test_expected_to_fail():
    raise AssertionError

def test_runs():
    pass
"""
MODULE = """
from helpers.paths import TESTS
from helpers import needs
needs.missing("triton", "not installed")
"""


def outcome(tmp_path: Path, must_run: str | None, *options: str) -> tuple[int, str]:
    (tmp_path / "test_inside.py").write_text(INSIDE)
    (tmp_path / "test_module.py").write_text(MODULE)
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST", "REINFORGE", "CI"))
    }
    environment["PYTHONPATH"] = str(TESTS)
    if must_run is not None:
        environment["REINFORGE_MUST_RUN"] = must_run
    plain = ("-p", "helpers.needs", "-p", "no:cacheprovider", "-c", os.devnull)
    command = [sys.executable, "-m", "pytest", *plain, *options, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    return done.returncode, done.stdout + done.stderr


def test_skips_are_counted_by_reason(tmp_path: Path) -> None:
    code, said = outcome(tmp_path, None)
    assert code == 0, said
    assert "1 passed, 5 skipped, 1 xfailed" in said
    lines = [line.strip() for line in said.partition("skipped, by reason")[2].splitlines()[1:]]
    assert [line for line in lines if line][:4] == [
        "2  sandbox: no bwrap",
        "1  a browser: in the middle of a reason it is not a name",
        "1  browser: no chromium on the PATH",
        "1  triton: not installed",
    ]


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_what_must_run_and_was_skipped_fails(tmp_path: Path, options: tuple[str, ...]) -> None:
    code, said = outcome(tmp_path, "browser sandbox", *options)
    assert code == 1, said
    assert said.count("REINFORGE_MUST_RUN says that it must run here") == 3
    assert "1 failed, 1 passed, 2 skipped, 1 xfailed, 2 errors" in said


def test_a_module_that_must_run_fails_too(tmp_path: Path) -> None:
    code, said = outcome(tmp_path, "triton")
    assert code != 0 and "must run here: triton: not installed" in said


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    code, said = outcome(tmp_path, "sandbx")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "sandbx is none of axe, browser, sandbox, triton" in said
