"""A configuration while it is being put together, with what became of every key of theirs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from reinforge.migrate.table import State


@dataclass(frozen=True)
class Note:
    """What became of one key of theirs."""

    theirs: str
    value: Any
    state: State
    ours: str = ""
    says: str = ""


@dataclass
class Draft:
    """Made by `translate`; libraries read `given` and write with `put` and `tell`."""

    library: str
    method: str
    given: dict[str, Any]  # theirs, as read
    tree: dict[str, Any] = field(default_factory=dict)  # ours
    notes: dict[str, Note] = field(default_factory=dict)  # by their key
    remarks: list[str] = field(default_factory=list)  # about the whole file
    defaults: dict[str, str] = field(default_factory=dict)  # our key: of which key the default is

    def get(self, *names: str, default: Any = None) -> Any:
        """The value of the first of these keys that is given and not null."""
        for name in names:
            if self.given.get(name) is not None:
                return self.given[name]
        return default

    def number(self, *names: str, default: float | None = None) -> float | None:
        value = self.get(*names, default=default)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else default

    def whole(self, *names: str, default: int | None = None) -> int | None:
        value = self.number(*names, default=default)
        return None if value is None else round(value)

    def put(self, key: str, value: Any) -> None:
        """Sets a dotted key of ours."""
        here = self.tree
        *sections, last = key.split(".")
        for section in sections:
            here = here.setdefault(section, {})
        here[last] = copy.deepcopy(value)

    def is_set(self, key: str) -> bool:
        return self.at(key) is not None

    def at(self, key: str) -> Any:
        here: Any = self.tree
        for part in key.split("."):
            here = here.get(part) if isinstance(here, dict) else None
        return here

    def drop(self, key: str) -> bool:
        """Removes a dotted key of ours, and sections that are empty then."""
        *sections, last = key.split(".")
        trail = [self.tree]
        for section in sections:
            if not isinstance(trail[-1].get(section), dict):
                return False
            trail.append(trail[-1][section])
        if last not in trail[-1]:
            return False
        del trail[-1][last]
        for above, section, inner in zip(trail, sections, trail[1:], strict=False):
            if not inner:
                above.pop(section, None)
        return True

    def tell(self, theirs: str, state: State | None = None, *, ours: str = "", says: str) -> None:
        """Says more of a key than its table does, if it was given."""
        note = self.notes.get(theirs)
        if note is not None:
            self.notes[theirs] = replace(
                note, state=state or note.state, ours=ours or note.ours, says=says
            )

    def made_of(self, key: str) -> Iterator[Note]:
        """The notes of keys that became this key of ours."""
        for note in self.notes.values():
            if any(name == key or name.startswith(f"{key}.") for name in note.ours.split(", ")):
                yield note
