"""Writes docs/reference/config.md from the configuration schema.

A test checks that the committed page is this one.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from reinforge.config.reference import reference_markdown  # noqa: E402

if __name__ == "__main__":
    page = ROOT / "docs" / "reference" / "config.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(reference_markdown().rstrip("\n") + "\n", encoding="utf-8")
    print(f"wrote {page.relative_to(ROOT)}")
