"""Writes docs/reference/migrate.md from the tables of `reinforge migrate`, and the table of counts
in docs/migrate.md from the files in tests/data/migrate.

A test checks that the committed pages have it.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from reinforge.migrate.source import LIBRARIES  # noqa: E402
from reinforge.migrate.table import KeyRow, load_table  # noqa: E402
from reinforge.migrate.translate import EXPLAINED, migrate_file  # noqa: E402

PAGE = ROOT / "docs" / "migrate.md"
REFERENCE = ROOT / "docs" / "reference" / "migrate.md"
FILES = ROOT / "tests" / "data" / "migrate"
BEGIN = "<!-- made by tools/gen_migrate.py -->"
END = "<!-- end -->"
HEAD = """# Keys of other libraries

Made by `make reference` from the tables of [`reinforge migrate`](../migrate.md) in
`migrate/tables/`. `*` stands for any name. Rows of transformers' TrainingArguments hold for TRL and
LLaMA-Factory.
"""


def counts() -> str:
    """How many keys of the files of each library are what."""
    lines = [
        "| library | files | keys | mapped | mean something else | nothing to set | no counterpart"
        " | not known |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for folder, name in LIBRARIES.items():
        found = [
            migrate_file(path)
            for path in sorted((FILES / folder).iterdir())
            if path.suffix in (".yaml", ".sh", ".py")
        ]
        states = sum((one.counts() for one in found), Counter[str]())
        cells = [name, len(found), states.total(), *(states[state] for state in EXPLAINED)]
        lines.append(
            "| " + " | ".join(map(str, [*cells, states["unknown"] + states["unread"]])) + " |"
        )
    return "\n".join(lines)


def reference() -> str:
    parts = [HEAD]
    for name in ("training_arguments", *LIBRARIES):
        table = load_table(name)
        shared = load_table("training_arguments").rows if name != "training_arguments" else ()
        rows = [row for row in table.rows if row not in shared]
        title = "TrainingArguments" if name == "training_arguments" else table.library
        parts.append(f"## {title}\n\nRead from {table.seen}.\n")
        parts.append(
            "\n".join(
                ["| theirs | here | what differs, or why not |", "|---|---|---|", *map(_line, rows)]
            )
            + "\n"
        )
    return "\n".join(parts)


def _line(row: KeyRow) -> str:
    theirs = ", ".join(f"`{key}`" for key in row.theirs)
    ours = ", ".join(f"`{key}`" for key in row.ours.split(", ")) if row.ours else ""
    words = {"nothing": "nothing to set: ", "missing": "no counterpart: "}.get(row.state, "")
    only = f"({', '.join(sorted(row.methods))}) " if row.methods else ""
    says = (
        f"{words}{row.says}".replace("|", "\\|")
        .replace("{}", "`{}`")
        .replace("{prompt}", "`{prompt}`")
    )
    return f"| {theirs} | {ours} | {only}{says} |"


def with_counts(text: str) -> str:
    """The page with a fresh table between its two marks."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{counts()}\n\n{END}{after}"


if __name__ == "__main__":
    REFERENCE.write_text(reference(), encoding="utf-8")
    PAGE.write_text(with_counts(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {REFERENCE.relative_to(ROOT)} and {PAGE.relative_to(ROOT)}")
