"""Builds what is released, and proves that it works where nothing else is installed.

    python tools/release.py [--out dist] [--tag v0.2.0] [--no-demo]

1. Version and changelog fit together; with --tag also the tag and the commit.
2. The source archive and the wheel are built from the files that git knows.
3. The wheel has every module, recipe and page that the package needs, and nothing else.
4. It is installed into a new environment, with all that it depends on, and the demo runs there.

`make release` calls it. Exits with 1 and says why where one of these does not hold.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from email import message_from_bytes
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?")
HEADING = re.compile(r"^## +(\S+)", re.MULTILINE)
DEMO = ("demo", "--quick")


class ReleaseError(Exception):
    """What keeps a release from being made."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--tag", help="the tag that this is released under")
    parser.add_argument("--no-demo", action="store_true", help="build and look, install nothing")
    asked = parser.parse_args(argv)
    try:
        release(asked.out, asked.tag, demo=not asked.no_demo)
    except ReleaseError as error:
        sys.exit(f"release: {error}")


def release(out: Path, tag: str | None, *, demo: bool) -> None:
    version = read_version(ROOT)
    check_changelog((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version, tag is not None)
    if tag is not None:
        check_tag(ROOT, tag, version)
    print(f"== reinforge {version}")
    archive, wheel = build(ROOT, out)
    check_wheel(wheel, version)
    for path in (archive, wheel):
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    if demo:
        with tempfile.TemporaryDirectory(prefix="reinforge-release-") as folder:
            print("== installing the wheel into a new environment (some minutes)")
            python = install(wheel, Path(folder) / "env")
            print("== the demo")
            run_demo(python, Path(folder))
    print("== everything holds")


# ---- version, changelog, tag ----


def read_version(root: Path) -> str:
    text = (root / "src" / "reinforge" / "version.py").read_text(encoding="utf-8")
    found = re.search(r'__version__ = "([^"]+)"', text)
    if found is None or not VERSION.fullmatch(found[1]):
        raise ReleaseError("src/reinforge/version.py has no version of the form 1.2.3 or 1.2.3rc1")
    return found[1]


def check_changelog(text: str, version: str, final: bool) -> None:
    """The newest section is that of the version; before it is final it may be called Unreleased."""
    names = HEADING.findall(text)
    if not names:
        raise ReleaseError("CHANGELOG.md has no section")
    section = text.split(f"## {names[0]}", 1)[1].partition("\n## ")[0]
    if "\n- " not in section:
        raise ReleaseError(f"CHANGELOG.md: the section {names[0]} says nothing")
    if names[0] == version or (names[0] == "Unreleased" and not final):
        return
    raise ReleaseError(
        f"CHANGELOG.md begins with the section {names[0]}, and the version is {version}: name the"
        f" section `## {version} (date)`, or change src/reinforge/version.py"
    )


def check_tag(root: Path, tag: str, version: str) -> None:
    """The tag is that of the version, and of this commit, and nothing was changed since."""
    if tag != f"v{version}":
        raise ReleaseError(f"the tag is {tag}, and that of version {version} would be v{version}")
    if changed := _git(root, "status", "--porcelain", "--untracked-files=no"):
        raise ReleaseError(f"changes that are not committed:\n{changed}")
    if tag not in _git(root, "tag", "--points-at", "HEAD").split():
        raise ReleaseError(f"this commit has no tag {tag}: git tag -a {tag}")


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise ReleaseError(f"git {words[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


# ---- archive and wheel ----


def build(root: Path, out: Path) -> tuple[Path, Path]:
    """The source archive and the wheel of the files that git knows, in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="reinforge-build-") as folder:
        source = Path(folder) / "source"
        for name in _git(root, "ls-files").splitlines():
            if (root / name).is_file():
                (source / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, source / name)
        made = Path(folder) / "made"
        made.mkdir()
        code = "import setuptools.build_meta as b, sys; b.build_sdist({0!r}); b.build_wheel({0!r})"
        done = subprocess.run(
            [sys.executable, "-c", code.format(str(made))],
            cwd=source,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise ReleaseError(f"the build failed:\n{done.stderr[-3000:]}")
        (archive,) = made.glob("*.tar.gz")
        (wheel,) = made.glob("*.whl")
        return Path(shutil.copy2(archive, out)), Path(shutil.copy2(wheel, out))


def needed_files(root: Path) -> set[str]:
    """What a wheel must have: all of the package, and the recipes inside of it."""
    known = _git(root, "ls-files", "src", "recipes").splitlines()
    there = [name for name in known if (root / name).is_file()]
    package = {name.removeprefix("src/") for name in there if name.startswith("src/")}
    recipes = {f"reinforge/{name}" for name in there if name.startswith("recipes/")}
    return package | recipes


def check_wheel(wheel: Path, version: str, root: Path = ROOT) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if not name.endswith("/")}
        (place,) = [name for name in inside if name.endswith(".dist-info/METADATA")]
        told = message_from_bytes(archive.read(place))["Version"]
    about = place.partition("/")[0]
    files = {name for name in inside if not name.startswith(f"{about}/")}
    needed = needed_files(root)
    if told != version:
        raise ReleaseError(f"{wheel.name} says that it is version {told}, not {version}")
    if missing := sorted(needed - files):
        raise ReleaseError(f"{wheel.name} lacks {', '.join(missing[:10])}")
    if foreign := sorted(files - needed):
        raise ReleaseError(f"{wheel.name} has what git does not know: {', '.join(foreign[:10])}")


# ---- where nothing else is installed ----


def install(wheel: Path, folder: Path, *options: str) -> Path:
    """The wheel in a new environment, with all that it depends on: its Python. `options` are
    pip's.
    """
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    command = [str(python), "-m", "pip", "install", "-q", "--no-input", *options, str(wheel)]
    done = subprocess.run(command, env=_bare(), capture_output=True, text=True)
    if done.returncode:
        raise ReleaseError(f"pip could not install {wheel.name}:\n{done.stderr[-3000:]}")
    return python


def run_demo(python: Path, folder: Path) -> None:
    """`reinforge demo` as somebody runs it who has installed the wheel and has no repository."""
    target = folder / "demo"
    command = [str(python.with_name("reinforge")), *DEMO, "--dir", str(target)]
    done = subprocess.run(command, cwd=folder, env=_bare(), capture_output=True, text=True)
    if done.returncode or not (target / "summary.json").exists():
        raise ReleaseError(f"the demo failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    print("\n".join(line for line in done.stdout.splitlines() if "held-out problems" in line))


def _bare() -> dict[str, str]:
    """The environment without what would show a Python the way back here."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")
    return {name: value for name, value in os.environ.items() if name not in hidden}


if __name__ == "__main__":
    main()
