"""What `make ui` built is what the sources say, small, and free of other people's addresses."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from helpers.paths import ROOT

UI = ROOT / "ui"
LIBRARY = ROOT / "src" / "reinforge"
STAMP = json.loads((LIBRARY / "ui" / "assets" / "stamp.json").read_text())
LARGEST = 300_000  # bytes of the app, uncompressed


def sources() -> list[Path]:
    found = [path for path in (UI / "src").rglob("*") if path.is_file()]
    return sorted(
        [*found, UI / "build.mjs", UI / "package-lock.json"],
        key=lambda path: path.relative_to(UI).as_posix(),
    )


def test_the_stamp_fits_the_sources() -> None:
    digest = hashlib.sha256()
    for path in sources():
        digest.update(path.relative_to(UI).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    assert STAMP["sources"] == digest.hexdigest(), "the sources changed: run `make ui`"


def test_the_stamp_fits_what_was_built() -> None:
    built = {
        name: hashlib.sha256((LIBRARY / name).read_bytes()).hexdigest() for name in STAMP["made"]
    }
    assert built == STAMP["made"], "a built file was changed by hand: run `make ui`"
    there = {path.name for path in (LIBRARY / "ui" / "assets").iterdir()}
    named = {Path(name).name for name in STAMP["made"] if name.startswith("ui/assets/")}
    assert there == named | {"stamp.json"}


def test_the_app_is_small() -> None:
    assert sum((LIBRARY / name).stat().st_size for name in STAMP["made"]) < LARGEST


def test_no_registry_is_named() -> None:
    lock = (UI / "package-lock.json").read_text()
    assert '"resolved"' not in lock, "npm install --omit-lockfile-registry-resolved"
    texts = [path.read_text() for path in [*sources(), *(LIBRARY / name for name in STAMP["made"])]]
    hosts = {host for text in texts for host in re.findall(r"https?://([\w.-]+)", text)}
    # the name of SVG, and where people give to those who write Preact
    assert hosts <= {"www.w3.org", "opencollective.com"}
