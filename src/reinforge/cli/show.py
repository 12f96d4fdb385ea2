"""Prints results: tables for people at a terminal, plain lines when the output goes into a file or
a pipe.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


GAP = 2  # between columns
INDENT = 2  # of what stands under a heading


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
    """One `key  value` each, aligned.

    At a terminal a long value goes on under itself, and is broken between words only.
    """
    from rich.text import Text

    width = max(map(len, values), default=0)
    out = console()
    for key, value in values.items():
        if value is None:
            continue
        lines = (
            wrapped(text_of(value), out.width - width - GAP)
            if out.is_terminal
            else [text_of(value)]
        )
        for i, line in enumerate(lines):
            out.print(
                Text("" if i else key, style="bold").append(
                    " " * (width + GAP - (0 if i else len(key))) + line, style="not bold"
                ),
                soft_wrap=True,
            )


def print_text(text: str) -> None:
    """Lines for people, broken between words at a terminal."""
    from rich.text import Text

    out = console()
    for line in text.splitlines():
        for part in wrapped(line, out.width) if out.is_terminal else [line]:
            out.print(Text(part), soft_wrap=True)


def wrapped(text: str, room: int) -> list[str]:
    """Lines of at most `room` characters.

    A word that is longer, such as a path, stays whole: the terminal breaks it, and copies it whole.

    >>> wrapped("one two three", 7), wrapped("", 7), wrapped("a/long/path b", 4)
    (['one two', 'three'], [''], ['a/long/path', 'b'])
    """
    return textwrap.wrap(text, max(room, 1), break_long_words=False, break_on_hyphens=False) or [""]


def print_table(rows: Sequence[Mapping[str, Any]], *, empty: str = "nothing to show") -> None:
    """A table with the union of the rows' keys as columns; where it does not fit without breaking
    words, a paragraph for each row. Tab-separated when nobody watches.
    """
    from rich.markup import escape
    from rich.table import Table

    out = console()
    if not rows:
        out.print(empty)
        return
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[text_of(row.get(column)) for column in columns] for row in rows]
    if not out.is_terminal:
        for line in (
            columns,
            *([cell.replace("\t", " ").replace("\n", " ") for cell in line] for line in cells),
        ):
            print("\t".join(line))
        return
    widths = fitted(
        [list(column) for column in zip(columns, *cells, strict=True)],
        out.width - GAP * len(columns),
    )
    if widths is None:
        _print_paragraphs(out, columns, cells)
        return
    table = Table(header_style="bold", box=None)
    for column, width in zip(columns, widths, strict=True):
        table.add_column(escape(column), width=width)
    for line in cells:
        table.add_row(*map(escape, line))
    out.print(table)


def fitted(columns: Sequence[Sequence[str]], room: int) -> list[int] | None:
    """Widths of columns of text that take at most `room` together and break no word; None where
    there are none.

    >>> table = [["a", "bc"], ["one two", "three"]]
    >>> fitted(table, 9), fitted(table, 7), fitted([["abc"], ["def"]], 5)
    ([2, 7], [2, 5], None)
    """
    from rich.cells import cell_len

    widths = [max(map(cell_len, column), default=0) for column in columns]
    least = [
        max((cell_len(word) for text in column for word in text.split()), default=0)
        for column in columns
    ]
    if sum(least) > room:
        return None
    while sum(widths) > room:
        widest = max(range(len(widths)), key=lambda i: widths[i] - least[i])
        widths[widest] -= 1
    return widths


def _print_paragraphs(out: Console, columns: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    """The first column as a heading, the rest of the row under it, without what is empty."""
    from rich.text import Text

    for first, *rest in cells:
        out.print(Text(first, style="bold"), soft_wrap=True)
        said = [
            f"{column} {cell}"
            for column, cell in zip(columns[1:], rest, strict=True)
            if cell not in ("", "-")
        ]
        for line in wrapped(", ".join(said), out.width - INDENT):
            out.print(Text(" " * INDENT + line), soft_wrap=True)
