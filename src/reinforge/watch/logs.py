"""Reading what a run wrote about itself.

Nothing is trusted to be complete: a run may be writing it now, or was killed while it did.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic_core import from_json

CHUNK = 8 << 20  # bytes of a log that are read at once
MARK = 64  # bytes before the place that was read to, by which a rewritten log is known


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or nothing where there is none or it is cut."""
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file; a last line that is still being written is left out."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            value = parse_line(line)
            if value is not None:
                yield value


def parse_line(line: bytes) -> dict[str, Any] | None:
    """A JSON object, or None where the line is none.

    pydantic's parser takes a third of the time of Python's, but no lone surrogates.
    """
    try:
        value = from_json(line)
    except ValueError:
        try:
            value = json.loads(line)
        except ValueError:
            return None
    return value if isinstance(value, dict) else None


class LogTail:
    """A log that grows: reads each whole line once. Who watches a run keeps one for each of its
    logs.

    A resumed run cuts its logs back: where what was read last is not there any more, `restarted`
    says so and everything comes again.
    """

    def __init__(self, path: Path):
        self.path = path
        self.offset = 0
        self.restarted = False
        self._mark = b""
        self._inode = -1

    def read(self) -> Iterator[tuple[int, bytes]]:
        """(offset, line) of every line that was completed since the last call."""
        for at, part in self.parts():
            for line in part.split(b"\n")[:-1]:
                yield at, line
                at += len(line) + 1

    def parts(self) -> Iterator[tuple[int, bytes]]:
        """The same in large parts: (offset, whole lines with the ends of lines)."""
        self.restarted = False
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            self._begin_again(-1)
            return
        with file:
            stat = os.fstat(file.fileno())
            if not self._goes_on(file, stat):
                self._begin_again(stat.st_ino)
            file.seek(self.offset)
            rest = b""
            while chunk := file.read(CHUNK):
                data = rest + chunk
                end = data.rfind(b"\n") + 1
                part, rest = data[:end], data[end:]
                if not part:
                    continue
                self._mark = (self._mark + part[-MARK:])[-MARK:]
                yield self.offset, part
                # only now: of who stops in the middle, mark and place differ, and all comes again
                self.offset += end

    def _goes_on(self, file: Any, stat: os.stat_result) -> bool:
        if stat.st_ino != self._inode or stat.st_size < self.offset:
            return False
        file.seek(self.offset - len(self._mark))
        return bool(file.read(len(self._mark)) == self._mark)

    def _begin_again(self, inode: int) -> None:
        self.restarted = self.offset > 0
        self.offset = 0
        self._mark = b""
        self._inode = inode


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """{"train": {"steps": 3}} as {"train.steps": 3}; lists of sections count from 0:
    rewards.0.name.
    """
    items = (
        value.items()
        if isinstance(value, Mapping)
        else enumerate(value)
        if _sections(value)
        else None
    )
    if items is None or not value:
        return {prefix: value} if prefix else {}
    return {
        k: v
        for key, item in items
        for k, v in flatten(item, f"{prefix}.{key}" if prefix else str(key)).items()
    }


def _sections(value: Any) -> bool:
    return (
        isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)
    )
