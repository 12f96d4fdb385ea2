"""The files of the page, which `make ui` builds."""

from __future__ import annotations

from pathlib import Path

from reinforge.core.errors import InputError
from reinforge.ui.errors import NoSuchRun

FOLDER = Path(__file__).with_name("assets")
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}


def asset(name: str) -> tuple[bytes, str]:
    """Content and type of one file; only of the folder itself."""
    there = {path.name: path for path in FOLDER.glob("*") if path.suffix in TYPES}
    if name in there:
        return there[name].read_bytes(), TYPES[there[name].suffix]
    if name == "index.html":
        raise InputError("the page of the web app was not built.", where=str(FOLDER), fix="make ui")
    raise NoSuchRun(f"there is no {name!r} here.", where="path", fix="The page is at /.")
