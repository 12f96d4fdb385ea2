"""`.ci/run`: what it installs, what it then demands, and how it ends.

`make`, `apt-get` and `id` are stand-ins.
"""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from helpers.paths import ROOT

TOOLS = ("bash", "env", "dirname", "mktemp", "rm", "tee", "tail", "grep", "cat", "chmod")

STANDINS = {
    "timeout": 'while [[ $1 == --* || $1 =~ ^[0-9]+m?$ ]]; do shift; done\nexec "$@"',
    "make": (
        'echo "make $* must=${REINFORGE_MUST_RUN-nothing}" >>"$SAID"\n'
        "case $1 in test | test-scale)\n"
        'echo "    3  sandbox: no bwrap"\necho "7 passed, 3 skipped in 1.00s" ;;\nesac\n'
        '[ "$1" != "$FAILING" ]'
    ),
    "apt-get": 'echo "apt-get $*" >>"$SAID"\n[ -z "${OFFLINE-}" ]',
    "id": 'echo "$WHO"',
}


def runs(
    tmp_path: Path, present: tuple[str, ...] = (), **environment: str
) -> tuple[int, list[str], str]:
    """Exit code, what was called, what was printed."""
    programs = tmp_path / "bin"
    said = tmp_path / "said"
    programs.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        assert found, name
        (programs / name).symlink_to(found)
    for name, body in {**STANDINS, **dict.fromkeys(present, "true")}.items():
        if name != environment.get("WITHOUT"):
            (programs / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
            (programs / name).chmod(0o755)
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    settings = {
        "PATH": str(programs),
        "SAID": str(said),
        "WHO": "0",
        "FAILING": "",
        "TMPDIR": str(tmp_path),
        **environment,
    }
    done = subprocess.run(
        [shutil.which("bash") or "bash", str(tmp_path / ".ci" / "run")],
        capture_output=True,
        text=True,
        env=settings,
    )
    return done.returncode, said.read_text().splitlines(), done.stdout + done.stderr


MUST = "must=browser sandbox triton"
INSTALL = "apt-get -qq -y install --no-install-recommends"


def apt(called: list[str]) -> list[str]:
    return [line for line in called if line.startswith("apt-get")]


def targets(called: list[str]) -> list[str]:
    """The targets of make that test, in their order. The environments are made beside them:
    the small one before the first test, the large one by the time that it is asked for.
    """
    made = [line.removeprefix("make ") for line in called if line.startswith("make")]
    names = [line.split()[0] for line in made]
    assert sorted(name for name in names if name.startswith("env")) == ["env-test", "env-vllm"]
    if "test" in names:
        assert names.index("env-test") < names.index("test")
    if "test-scale" in names:
        assert names.index("env-vllm") < names.index("test-scale")
    return [line for line, name in zip(made, names, strict=True) if not name.startswith("env")]


def all_with(must: str) -> list[str]:
    return [f"test -k {must}", f"test-scale {must}"]


def test_root_installs_what_is_missing_and_demands_it(tmp_path: Path) -> None:
    code, called, printed = runs(tmp_path, present=("chromium",))
    assert code == 0
    assert apt(called) == ["apt-get -qq update", f"{INSTALL} bubblewrap"]
    assert targets(called) == all_with(MUST)
    assert (
        printed.splitlines()[-4:]
        == ["    3  sandbox: no bwrap", "7 passed, 3 skipped in 1.00s"] * 2
    )


def test_nothing_is_installed_that_is_there(tmp_path: Path) -> None:
    _, called, _ = runs(tmp_path, present=("chromium", "bwrap"))
    assert apt(called) == [] and targets(called) == all_with(MUST)


def test_a_failed_installation_is_told_and_the_tests_run(tmp_path: Path) -> None:
    _, called, printed = runs(tmp_path, OFFLINE="1")
    assert apt(called) == ["apt-get -qq update", f"{INSTALL} chromium", f"{INSTALL} bubblewrap"]
    assert targets(called) == all_with(MUST)
    for package in ("chromium", "bubblewrap"):  # one that there is not does not keep the other away
        assert f"the tests that need {package} will fail" in printed


def test_another_name_of_the_browser_will_do(tmp_path: Path) -> None:
    _, called, _ = runs(tmp_path, present=("google-chrome", "bwrap"))
    assert apt(called) == [] and targets(called) == all_with(MUST)


@pytest.mark.parametrize(
    "environment", [{"WHO": "1000"}, {"WITHOUT": "apt-get"}], ids=["a user", "no apt-get"]
)
def test_elsewhere_nothing_of_the_system_is_demanded(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    code, called, printed = runs(tmp_path, **environment)
    assert code == 0 and apt(called) == [] and targets(called) == all_with("must=triton")
    assert "are skipped" in printed


def test_a_failure_is_the_exit_code_and_scale_is_tried_again(tmp_path: Path) -> None:
    code, called, printed = runs(tmp_path, present=("chromium", "bwrap"), FAILING="test-scale")
    assert code == 1 and "== summary: failed, exit 1" in printed
    assert called[-1] == f"make test-scale ARGS=--lf {MUST}"


def test_what_fails_does_not_keep_the_rest_from_running(tmp_path: Path) -> None:
    code, called, printed = runs(tmp_path, present=("chromium", "bwrap"), FAILING="test")
    assert code == 1 and "== summary: failed, exit 1" in printed
    assert targets(called) == all_with(MUST)


def test_vllm_may_be_missing_and_the_environment_may_not(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    present = ("chromium", "bwrap")
    code, called, _ = runs(tmp_path / "one", present=present, FAILING="env-vllm")
    assert code == 0 and targets(called) == all_with(MUST)
    code, called, printed = runs(tmp_path / "two", present=present, FAILING="env-test")
    assert code == 1 and targets(called) == [] and "== summary: failed, exit 1" in printed


def test_triton_is_pinned_and_installed_for_the_tests() -> None:
    """Its interpreter runs the kernel tests on a CPU; `make lock` must not take the pin away."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert any("kernels" in requirement for requirement in extras["test"])
    assert any(requirement.startswith("triton") for requirement in extras["kernels"])
    assert any(
        line.startswith("triton==") for line in (ROOT / "constraints.txt").read_text().splitlines()
    )
    (recipe,) = [
        line
        for line in (ROOT / "Makefile").read_text().splitlines()
        if "sed -i" in line and "constraints.txt" in line
    ]
    assert "triton" not in recipe
