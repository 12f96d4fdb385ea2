"""The docs page of the compatibility tables. `tools/gen_reference.py` writes it."""

from __future__ import annotations

from reinforge.config.rules.check import TABLES
from reinforge.config.rules.table import Cell, Column, Feature, No, Rule, Table, filled

# what the places of a text stand for where there is no configuration
GENERIC = {
    "algorithm": "the algorithm",
    "advantage": "the advantage",
    "surrogate": "of the algorithm",
    "backend": "this backend",
    "engine": "the server",
    "ranks": "that many",
    "steps": "all",
    "warmup": "so many",
    "share": "this share",
    "prompts": "so few",
    "staleness": "some",
}


def compatibility_markdown() -> str:
    """The page: a matrix and notes for every table."""
    lines = [
        "# What goes with what",
        "",
        "Made by `make reference` from the tables that also refuse a configuration"
        " (`config/rules/`), so a *yes* is what `reinforge plan` and `reinforge train` accept. A"
        " run may stand in several columns of a table: each of them may refuse it."
        " What was run for real, and on what, is told in [scale](../scale.md),"
        " [several processes](../distributed.md), [Ray](../ray.md) and [engines](../engines.md).",
        "",
    ]
    for table in TABLES:
        lines += _section(table)
    return "\n".join(lines)


def _section(table: Table) -> list[str]:
    notes = _Notes()
    lines = [f"## {table.title}", "", table.about, ""]
    lines += [f"- **{column.name}**: {column.setting}" for column in table.columns]
    names = " | ".join(column.name for column in table.columns)
    lines += ["", f"| | key | {names} |", "|---|---|" + "---|" * len(table.columns)]
    lines += [_row(feature, table.columns, notes) for feature in table.features]
    lines += ["", *notes.lines(), ""]
    if table.rules:
        lines += ["Refused whatever the column:", "", *map(_rule, table.rules), ""]
    return lines


class _Notes:
    """The numbered notes under one table; the same text has the same number."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def number(self, text: str) -> int:
        if text not in self.texts:
            self.texts.append(text)
        return self.texts.index(text) + 1

    def lines(self) -> list[str]:
        return [f"{number}. {text}" for number, text in enumerate(self.texts, 1)]


def _row(feature: Feature, columns: tuple[Column, ...], notes: _Notes) -> str:
    cells = [_cell(feature.cells[column.name], notes) for column in columns]
    return f"| {feature.name} | `{feature.key}` | {' | '.join(cells)} |"


def _cell(cell: Cell, notes: _Notes) -> str:
    if isinstance(cell, No):
        return f"no <sup>{notes.number(_sentence(cell))}</sup>"
    if cell.note:
        return f"yes <sup>{notes.number(cell.note)}</sup>"
    return "yes"


def _sentence(no: No) -> str:
    text = f"{filled(no.why, GENERIC)}; {filled(no.fix, GENERIC)}."
    return text[0].upper() + text[1:]


def _rule(rule: Rule) -> str:
    return f"- `{rule.key}`: {filled(rule.why, GENERIC)}; {filled(rule.fix, GENERIC)}."
