"""Rows that stand in a file instead of in memory, for data that are larger than it."""

from __future__ import annotations

import os
import pickle
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import overload

from reinforge.core.row import Row


class DiskRows(Sequence[Row]):
    """A list of rows that keeps 8 bytes of each in memory; the rows are in a file that nobody else
    sees and that is gone when this is. `load_rows` makes it where data are large, and everything
    that goes through rows reads it as it reads a list. Any row is found at once, so a shuffled walk
    over it, and resuming that walk, is the same as over a list.
    """

    def __init__(self, rows: Iterable[Row]):
        self._file = tempfile.TemporaryFile(prefix="reinforge-rows-")  # noqa: SIM115
        self._begins = array("q", [0])  # where each row begins, and where the last one ends
        for row in rows:
            written = self._file.write(pickle.dumps(row, protocol=pickle.HIGHEST_PROTOCOL))
            self._begins.append(self._begins[-1] + written)
        self._file.flush()
        self._places = array("q", range(len(self._begins) - 1))  # which of them are in this list

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> DiskRows: ...

    def __getitem__(self, index: int | slice) -> Row | DiskRows:
        if isinstance(index, slice):
            return self.select(range(len(self))[index])
        place = self._places[index]
        begin = self._begins[place]
        size = self._begins[place + 1] - begin
        row: Row = pickle.loads(os.pread(self._file.fileno(), size, begin))
        return row

    def __iter__(self) -> Iterator[Row]:
        return (self[i] for i in range(len(self)))

    def select(self, indices: Iterable[int]) -> DiskRows:
        """The rows with these numbers, in this order, from the same file."""
        part = object.__new__(DiskRows)
        part._file = self._file
        part._begins = self._begins
        part._places = array("q", (self._places[i] for i in indices))
        return part


class RowsById(Mapping[str, Row]):
    """Rows by their ids, each read when it is asked for. A replay buffer finds the rows of a
    checkpoint in it.
    """

    def __init__(self, rows: Sequence[Row]):
        self._rows = rows
        self._places = {row.id: i for i, row in enumerate(rows)}

    def __getitem__(self, name: str) -> Row:
        return self._rows[self._places[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def select(rows: Sequence[Row], indices: Iterable[int]) -> Sequence[Row]:
    """The rows with these numbers, in memory or on disk as the others are."""
    if isinstance(rows, DiskRows):
        return rows.select(indices)
    return [rows[i] for i in indices]
