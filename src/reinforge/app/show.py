"""Prints results: tables for people at a terminal, plain lines when the output goes into a file or a pipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def console() -> Console:
    from rich.console import Console

    return Console(highlight=False)


def text_of(value: Any) -> str:
    """
    >>> text_of(0.123456), text_of(12), text_of(None), text_of([1, 2])
    ('0.1235', '12', '-', '1, 2')
    """
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {text_of(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(text_of, value))
    return str(value)


def print_mapping(values: Mapping[str, Any]) -> None:
    """One `key  value` line each, aligned."""
    from rich.markup import escape

    width = max(map(len, values), default=0)
    out = console()
    for key, value in values.items():
        if value is not None:
            out.print(f"[bold]{escape(key.ljust(width))}[/bold]  {escape(text_of(value))}", soft_wrap=True)


def print_table(rows: Sequence[Mapping[str, Any]], *, empty: str = "nothing to show") -> None:
    """A table with the union of the rows' keys as columns. Tab-separated when nobody watches."""
    from rich.markup import escape
    from rich.table import Table

    out = console()
    if not rows:
        out.print(empty)
        return
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if not out.is_terminal:
        for line in ([c for c in columns], *([text_of(row.get(c)).replace("\t", " ").replace("\n", " ") for c in columns] for row in rows)):
            print("\t".join(line))
        return
    table = Table(header_style="bold", box=None)
    for column in columns:
        table.add_column(escape(column), overflow="fold")
    for row in rows:
        table.add_row(*(escape(text_of(row.get(column))) for column in columns))
    out.print(table)
