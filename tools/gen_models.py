"""Writes the tables of docs/models.md from config/model_table.py.

A test checks that the committed page has them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from reinforge.config import model_table  # noqa: E402
from reinforge.config.model_table import COLUMNS, TOLD, Support  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
BEGIN = "<!-- made by tools/gen_models.py -->"
END = "<!-- end -->"
SOME = ("vllm", "sglang", "fsdp", "deepspeed", "megatron")  # were run with some of them only


def tables() -> str:
    every = list(model_table.table())
    good = [each for each in every if each.verdict in ("right", "trains")]
    known = sorted((each for each in good if each.known_as), key=_by_name)
    others = [each for each in good if not each.known_as]
    lines = ["| | run with |", "|---|---|"]
    lines += [f"| {COLUMNS[name]} | {_run_with(good, name)} |" for name in SOME]
    lines += ["", "What the columns mean:", ""]
    lines += [f"- **{name}**: {COLUMNS[name]}" for name in TOLD]
    lines += ["", "### Models by name", ""]
    lines += [
        "A name that stands twice: its text model (`_text`), and checkpoints that see too,",
        "of which the text half is loaded.",
        "",
    ]
    lines += _table(known, lambda each: f"{each.known_as} | `{each.name}`", "model | `model_type`")
    lines += ["", "### Other architectures", ""]
    lines += _table(others, lambda each: f"`{each.name}`", "`model_type`")
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


def _run_with(entries: Sequence[Support], column: str) -> str:
    found = [f"`{each.name}`" for each in entries if each.cells[column].mark == "yes"]
    return ", ".join(found) or "a stub only"


def _by_name(each: Support) -> str:
    return (each.known_as or "").lower()


def _table(entries: Sequence[Support], first: Callable[[Support], str], heads: str) -> list[str]:
    """One row for each; `first` are its cells before those of the features."""
    return [
        f"| {heads} | " + " | ".join(TOLD) + " |",
        "|---" * (heads.count("|") + 1) + "|:-:" * len(TOLD) + "|",
        *(
            f"| {first(each)} | " + " | ".join(each.cells[column].mark for column in TOLD) + " |"
            for each in entries
        ),
    ]


def with_tables(text: str) -> str:
    """The page with fresh tables between its two marks."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
