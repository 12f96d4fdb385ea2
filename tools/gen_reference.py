"""Writes docs/reference/config.md from the configuration schema, compatibility.md beside it from
the tables that refuse a configuration, and python.md from what the package exports.

A test checks that the committed pages are these.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from api_reference import api_markdown  # noqa: E402

from reinforge.config.reference import reference_markdown  # noqa: E402
from reinforge.config.rules.page import compatibility_markdown  # noqa: E402

PAGES = {
    "config.md": reference_markdown,
    "compatibility.md": compatibility_markdown,
    "python.md": api_markdown,
}

if __name__ == "__main__":
    folder = ROOT / "docs" / "reference"
    folder.mkdir(parents=True, exist_ok=True)
    for name, markdown in PAGES.items():
        page = folder / name
        page.write_text(markdown().rstrip("\n") + "\n", encoding="utf-8")
        print(f"wrote {page.relative_to(ROOT)}")
