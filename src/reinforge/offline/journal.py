"""The output of `generate` while it is being made.

Every answered prompt is written to a journal beside the file at once; the file itself appears, or
changes, as a whole at the end. What either of them holds is not asked again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from reinforge.checkpoint.crash_points import crash_point
from reinforge.data.sources import REQUEST as REQUEST

# bookkeeping columns: REQUEST, the hash of what was asked, and that of what it was labelled with
LABELS = "_labels"
Line = dict[str, Any]


def digest(*parts: Any) -> str:
    """A hash of plain values."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


class GenerationJournal:
    """`known`: request -> the lines of its n completions."""

    def __init__(self, out: Path, n: int):
        self.out = out
        self.n = n
        self.journal = out.with_name(f".{out.name}.part")
        out.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(self.journal)
        self.known: dict[str, list[Line]] = {}
        self.known.update(_groups((line for line in _values(out) if _ours(line)), n))
        self.known.update(
            (g[0][REQUEST], g)
            for g in _values(self.journal)
            if isinstance(g, list) and len(g) == n and all(map(_ours, g))
        )

    def add(self, lines: list[Line]) -> None:
        """The completions of one prompt: one line of the journal, so that a kill loses all of them
        or none.
        """
        assert len(lines) == self.n and len({line[REQUEST] for line in lines}) == 1
        self.known[lines[0][REQUEST]] = lines
        with self.journal.open("ab") as file:
            file.write(_bytes([lines]))
        crash_point("journal:added")

    def finish(self, requests: Iterable[str]) -> list[Line]:
        """Writes the file, in the order of `requests`, and forgets the journal."""
        lines = [line for request in requests for line in self.known[request]]
        write_whole(self.out, lines)
        self.journal.unlink(missing_ok=True)
        return lines


def _bytes(values: Iterable[Any]) -> bytes:
    return "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values).encode(
        "utf-8", "surrogatepass"
    )


def write_whole(path: Path, lines: Iterable[Line]) -> None:
    """The file appears whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(_bytes(lines))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _cut_torn_line(path: Path) -> None:
    """A kill in the middle of a write leaves half a line, to which the next would be glued."""
    if path.is_file():
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(path, whole)


def _values(path: Path) -> Iterator[Any]:
    """What the lines of a file say.

    What else may be in a file of that name is going to be replaced.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        for raw in file:
            try:
                yield json.loads(raw)
            except ValueError:
                continue


def _ours(line: Any) -> bool:
    return isinstance(line, dict) and isinstance(line.get(REQUEST), str)


def _groups(lines: Iterator[Line], n: int) -> Iterator[tuple[str, list[Line]]]:
    """Runs of n lines of one request."""
    group: list[Line] = []
    for line in lines:
        group = (
            [*group, line]
            if group and group[0][REQUEST] == line[REQUEST] and len(group) < n
            else [line]
        )
        if len(group) == n:
            yield line[REQUEST], group
