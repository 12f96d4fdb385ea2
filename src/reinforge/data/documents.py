"""Documents: the rows of a source that have a `text`, and the text files and JSONL files of a
directory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from reinforge.config.data import DataConfig
from reinforge.core.errors import InputError
from reinforge.core.row import Row
from reinforge.data.chunks import chunks
from reinforge.data.readers import TEXTS
from reinforge.data.sources import load_rows

TEXT = "text"
LINES = ".jsonl"


def load_documents(data: DataConfig) -> Sequence[Row]:
    """The documents of `data.source`. Of a directory: its text files, then the rows of its JSONL
    files.
    """
    folder = Path(data.source).expanduser()
    if not folder.is_dir():
        return load_rows(data)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    found: list[Row] = []
    if any(path.suffix in TEXTS for path in files):
        found += load_rows(data)
    for path in files:
        if path.suffix == LINES:
            found += load_rows(data.model_copy(update={"source": str(path)}))
    if not found:
        raise InputError(
            "has no documents.",
            where=f"data.source {data.source}",
            fix=f"Give a directory of {', '.join(TEXTS)} or {LINES} files, or a file.",
        )
    return found[: data.limit]


def chunk_rows(documents: Sequence[Row], size: int, overlap: int) -> list[Row]:
    """A row for every chunk: the chunk in the column `text`, and where it is from."""
    made: dict[str, Row] = {}
    for row in documents:
        text = row.columns.get(TEXT)
        if not isinstance(text, str):
            raise InputError(
                f"is no document: it has no column {TEXT}, only"
                f" {', '.join(row.columns) or 'a prompt'}.",
                where=row.where,
                fix=f"Name it with data.columns: {{{TEXT}: <their name>}}.",
            )
        for start, chunk in chunks(text, size, overlap):
            name = f"{row.id}-{start}"
            while name in made:  # two files may have rows of one id
                name += "+"
            columns = {TEXT: chunk, "document": row.place or row.id, "start": start}
            made[name] = Row(name, chunk, columns, row.place)
    return list(made.values())
