"""The tables of keys: what each key of a library is called here, and what it means.

A table is a YAML file in `tables/`. A row names keys of theirs and one of these:

- `ours` alone: the same thing under our name;
- `ours` and `differs`: our key, and how its meaning differs;
- `nothing`: nothing has to be set, and why;
- `missing`: there is no counterpart, and why, or what is nearest.

`for` limits a row to methods (sft, dpo, grpo, ...), `values` says what their values are here,
`read: not` turns true and false around, `read: part` leaves the value to the library's file in
`libraries/`, and `default` is what theirs is where the key is not given and ours would be another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Literal

from reinforge.config.strict import parse

State = Literal["same", "differs", "nothing", "missing", "unknown", "unread"]
TABLES = Path(__file__).with_name("tables")


@dataclass(frozen=True)
class KeyRow:
    """One row of a table: keys that are alike."""

    theirs: tuple[str, ...]  # names; * stands for anything
    ours: str  # our key, or several with commas, or nothing
    state: State
    says: str  # the difference, or why there is nothing
    methods: frozenset[str]  # empty: all
    values: Mapping[str, Any] | None
    read: Literal["value", "not", "part"]
    default: Any  # a mapping: by method

    def covers(self, key: str, method: str) -> bool:
        return (not self.methods or method in self.methods) and any(
            fnmatchcase(key, name) for name in self.theirs
        )

    def default_for(self, method: str) -> Any:
        if isinstance(self.default, dict):
            return self.default.get(method, self.default.get("others"))
        return self.default


@dataclass(frozen=True)
class KeyTable:
    """All rows of a library."""

    library: str  # its name, for people
    seen: str  # the version that the rows were read from
    rows: tuple[KeyRow, ...]

    def find(self, key: str, method: str) -> KeyRow | None:
        """The first row with the key; names come before patterns."""
        exact = (row for row in self.rows if key in row.theirs and row.covers(key, method))
        wide = (row for row in self.rows if row.covers(key, method))
        return next(exact, None) or next(wide, None)


@cache
def load_table(name: str) -> KeyTable:
    path = TABLES / f"{name}.yaml"
    data, _ = parse(path.read_text(encoding="utf-8"), str(path))
    rows = tuple(_rows(data["keys"]))
    for other in data.get("also", ()):
        rows += load_table(other).rows
    return KeyTable(data["library"], str(data["seen"]), rows)


def _rows(items: list[dict[str, Any]]) -> Iterator[KeyRow]:
    for item in items:
        states = [state for state in ("differs", "nothing", "missing") if state in item]
        assert len(states) <= 1, f"{item['theirs']}: {states}"
        state: Any = states[0] if states else "same"
        theirs = item["theirs"]
        yield KeyRow(
            theirs=tuple([theirs] if isinstance(theirs, str) else theirs),
            ours=item.get("ours", ""),
            state=state,
            says=item.get(state, ""),
            methods=frozenset(item.get("for", ())),
            values=item.get("values"),
            read=item.get("read", "value"),
            default=item.get("default"),
        )
