"""Writes the table of formats in docs/data.md from data/formats/table.py.

A test checks that the committed page has it.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from reinforge.data.formats import FORMATS, Format  # noqa: E402

PAGE = ROOT / "docs" / "data.md"
BEGIN = "<!-- made by tools/gen_formats.py -->"
END = "<!-- end -->"


def table() -> str:
    lines = ["| `data.format` | columns | becomes | for | as in |", "|---|---|---|---|---|"]
    lines += [_line(name, format) for name, format in FORMATS.items()]
    return "\n".join(lines)


def _line(name: str, format: Format) -> str:
    needed = ", ".join(" or ".join(f"`{column}`" for column in group) for group in format.columns)
    more = ", ".join(column for column in format.more)
    becomes = ", ".join(
        f"`{ours}` = {made.replace('|', ' or ')}"
        for ours, made in format.becomes.items()
        if made != ours
    )
    cells = [
        f"`{name}`",
        f"{needed}; also {more}" if more else needed,
        becomes or "as it is",
        ", ".join(format.serves),
        format.known,
    ]
    return "| " + " | ".join(cells) + " |"


def with_table(text: str) -> str:
    """The page with a fresh table between its two marks."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
