"""Writes the tables of docs/models.md from config/model_table.py.

A test checks that the committed page has them.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from reinforge.config import model_table  # noqa: E402
from reinforge.config.model_table import COLUMNS, TOLD  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
BEGIN = "<!-- made by tools/gen_models.py -->"
END = "<!-- end -->"


def tables() -> str:
    every = list(model_table.table())
    good = [each for each in every if each.verdict in ("right", "trains")]
    lines = [
        "| `model_type` | known as | " + " | ".join(TOLD) + " |",
        "|---|---|" + "---|" * len(TOLD),
    ]
    lines += [
        f"| `{each.name}` | {each.known_as or ''} | "
        + " | ".join(each.cells[column].mark for column in TOLD)
        + " |"
        for each in good
    ]
    lines += ["", "What the columns mean:", ""]
    lines += [f"- **{name}**: {COLUMNS[name]}" for name in TOLD]
    lines += [
        "",
        "## What is refused",
        "",
        "Before weights are read, by `plan`, by `train` and by this list:",
        "",
        "| why | architectures |",
        "|---|---|",
    ]
    reasons: dict[str, list[str]] = {}
    for each in every:
        if each.reason is not None:
            reasons.setdefault(each.reason, []).append(f"`{each.name}`")
    lines += [f"| {why} | {', '.join(names)} |" for why, names in reasons.items()]
    return "\n".join(lines)


def with_tables(text: str) -> str:
    """The page with fresh tables between its two marks."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
