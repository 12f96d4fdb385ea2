"""tools/release.py: what it refuses, what a wheel must have, and that a wheel alone runs."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from helpers.source_tree import ROOT, project_files

sys.path.insert(0, str(ROOT / "tools"))

import release
from release import ReleaseError

CHANGES = (
    "# Changelog\n\n## {name}\n\n### Added\n\n- A thing.\n\n## 0.0.9 (2025-01-01)\n\n- First.\n"
)


def git(folder: Path, *words: str) -> None:
    name = ["-c", "user.name=A", "-c", "user.email=a@example.com"]
    subprocess.run(["git", *name, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A small package with a commit and the tag of its version."""
    folder = tmp_path / "project"
    for name, text in {
        "pyproject.toml": (
            '[build-system]\nrequires = ["setuptools"]\n'
            'build-backend = "setuptools.build_meta"\n'
            '[project]\nname = "reinforge"\ndynamic = ["version"]\n'
            '[tool.setuptools.dynamic]\nversion = {attr = "reinforge.version.__version__"}\n'
            '[tool.setuptools.packages.find]\nwhere = ["src"]\n'
        ),
        "src/reinforge/__init__.py": "",
        "src/reinforge/version.py": '__version__ = "0.1.0"\n',
        "src/reinforge/sub/__init__.py": "",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    git(folder, "tag", "v0.1.0")
    return folder


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """This project as a commit would have it, in a repository of its own."""
    folder = tmp_path / "ours"
    for path in project_files():
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
    git(folder, "init", "-q")
    git(folder, "add", ".")
    return folder


def test_the_changelog_begins_with_the_version() -> None:
    release.check_changelog(CHANGES.format(name="0.1.0 (2026-01-01)"), "0.1.0", final=True)
    release.check_changelog(CHANGES.format(name="Unreleased"), "0.1.0", final=False)
    with pytest.raises(ReleaseError, match=r"section Unreleased, and the version is 0.1.0"):
        release.check_changelog(CHANGES.format(name="Unreleased"), "0.1.0", final=True)
    with pytest.raises(ReleaseError, match=r"section 0.2.0, and the version is 0.1.0"):
        release.check_changelog(CHANGES.format(name="0.2.0"), "0.1.0", final=False)
    with pytest.raises(ReleaseError, match="the section 0.1.0 says nothing"):
        release.check_changelog("## 0.1.0\n\n## 0.0.9\n\n- First.\n", "0.1.0", final=True)


def test_ours_could_be_built_now() -> None:
    version = release.read_version(ROOT)
    release.check_changelog((ROOT / "CHANGELOG.md").read_text(), version, final=False)


def test_the_tag_is_that_of_the_version_and_of_the_commit(project: Path) -> None:
    release.check_tag(project, "v0.1.0", "0.1.0")
    with pytest.raises(ReleaseError, match=r"the tag is 0.1.0, and .* would be v0.1.0"):
        release.check_tag(project, "0.1.0", "0.1.0")
    with pytest.raises(ReleaseError, match="no tag v0.1.1"):
        release.check_tag(project, "v0.1.1", "0.1.1")
    (project / "src/reinforge/__init__.py").write_text("x = 1\n")
    with pytest.raises(ReleaseError, match=r"not committed:\n.*__init__.py"):
        release.check_tag(project, "v0.1.0", "0.1.0")
    git(project, "commit", "-qam", "second")
    with pytest.raises(ReleaseError, match="this commit has no tag v0.1.0"):
        release.check_tag(project, "v0.1.0", "0.1.0")


def test_a_version_has_three_numbers(project: Path) -> None:
    assert release.read_version(project) == "0.1.0"
    (project / "src/reinforge/version.py").write_text('__version__ = "0.1"\n')
    with pytest.raises(ReleaseError, match="no version of the form"):
        release.read_version(project)


def test_a_wheel_with_too_little_or_too_much_is_refused(project: Path, tmp_path: Path) -> None:
    (project / "src/reinforge/left_over.py").write_text("")  # nobody has committed it
    archive, wheel = release.build(project, tmp_path / "dist")
    assert archive.name == "reinforge-0.1.0.tar.gz"
    assert wheel.name == "reinforge-0.1.0-py3-none-any.whl"
    release.check_wheel(wheel, "0.1.0", project)
    with pytest.raises(ReleaseError, match="says that it is version 0.1.0, not 0.2.0"):
        release.check_wheel(wheel, "0.2.0", project)
    git(project, "add", ".")
    with pytest.raises(ReleaseError, match="lacks reinforge/left_over.py"):
        release.check_wheel(wheel, "0.1.0", project)
    git(project, "rm", "-q", "--cached", "src/reinforge/left_over.py")
    with zipfile.ZipFile(wheel, "a") as more:
        more.writestr("tests/secret.txt", "x")
    with pytest.raises(ReleaseError, match="what git does not know: tests/secret.txt"):
        release.check_wheel(wheel, "0.1.0", project)


def test_our_wheel_has_all_of_the_package(ours: Path, tmp_path: Path) -> None:
    _, wheel = release.build(ours, tmp_path / "dist")
    release.check_wheel(wheel, release.read_version(ours), ours)
    needed = release.needed_files(ours)
    assert {"reinforge/py.typed", "reinforge/watch/report.html"} <= needed
    assert "reinforge/recipes/chain_sum.yaml" in needed


@pytest.mark.long
def test_the_demo_runs_from_the_wheel_alone(
    ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The wheel without this repository; what it depends on is that of this environment."""
    _, wheel = release.build(ours, tmp_path / "dist")
    python = release.install(wheel, tmp_path / "env", "--no-deps", "--no-index")
    (packages,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    others = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (packages / "others.pth").write_text("\n".join(others) + "\n")
    code = "import reinforge; print(reinforge.__file__)"
    found = subprocess.run([python, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert Path(found.stdout.strip()).is_relative_to(packages), found.stderr
    release.run_demo(python, tmp_path)
    assert "of 64 held-out problems" in capsys.readouterr().out
