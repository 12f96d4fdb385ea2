"""Writes the tables of docs/algorithms/index.md from the catalogue of algorithms.

A test checks that the committed page has these.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from reinforge.algorithms.catalogue import describe  # noqa: E402

PAGE = ROOT / "docs" / "algorithms" / "index.md"
BEGIN = "<!-- made by tools/gen_algorithms.py -->"
END = "<!-- end -->"


def tables(entries: list[dict[str, Any]], pages: set[str]) -> str:
    """A table per family: the parts that some row of it has, defaults that are not everybody's,
    papers. `pages`: names with a page.
    """
    out = []
    for family in dict.fromkeys(e["family"] for e in entries):
        rows = [e for e in entries if e["family"] == family]
        parts = [
            p
            for p in dict.fromkeys(p for e in rows for p in e["parts"])
            if {e["parts"].get(p) for e in rows} != {"none"}
        ]
        lines = [
            f"### {family.replace('_', ' ')}",
            "",
            _line(["name", *parts, "its own defaults", "paper"]),
            "|" + "---|" * (len(parts) + 3),
        ]
        for e in rows:
            name = f"[{e['name']}]({e['name']}.md)" if e["name"] in pages else f"`{e['name']}`"
            defaults = ", ".join(f"{key} {_value(value)}" for key, value in e["defaults"].items())
            lines.append(
                _line(
                    [
                        name,
                        *(e["parts"].get(p, "") for p in parts),
                        defaults,
                        ", ".join(map(_paper, e["paper"].split(", "))),
                    ]
                )
            )
        out.append("\n".join(lines))
    return "\n\n".join(out)


def with_tables(text: str) -> str:
    """The page with fresh tables between its two marks."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    pages = {path.stem for path in PAGE.parent.glob("*.md")}
    return f"{before}{BEGIN}\n\n{tables(describe(), pages)}\n\n{END}{after}"


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_value(v)}" for k, v in value.items()) + "}"
    return (
        str(value).lower()
        if isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def _paper(paper: str) -> str:
    return f"[{paper}](https://arxiv.org/abs/{paper})" if paper[:1].isdigit() else paper


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
