"""A file of another library becomes a configuration of ours, with a note on every key."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from reinforge.migrate.draft import Draft, Note
from reinforge.migrate.libraries import llamafactory, nemo_rl, openrlhf, trl, verl
from reinforge.migrate.readers.script import Unread
from reinforge.migrate.settle import settle
from reinforge.migrate.source import LIBRARIES, Source, read_source
from reinforge.migrate.table import KeyRow, load_table

# each says which method a file is of, and what several keys make together
MODULES: dict[str, ModuleType] = {
    "trl": trl,
    "verl": verl,
    "openrlhf": openrlhf,
    "llamafactory": llamafactory,
    "nemo_rl": nemo_rl,
}
EXPLAINED = ("same", "differs", "nothing", "missing")


@dataclass(frozen=True)
class Migration:
    """What `reinforge migrate` found: our configuration, and what became of their keys."""

    path: Path
    library: str  # its name, for people
    method: str
    config: dict[str, Any]
    notes: tuple[Note, ...]
    remarks: tuple[str, ...]
    defaults: dict[str, str]  # our key: their key whose default stands there

    def counts(self) -> Counter[str]:
        return Counter(note.state for note in self.notes)

    @property
    def share(self) -> float:
        """Of their keys: those that are mapped or explained."""
        counts = self.counts()
        return sum(counts[state] for state in EXPLAINED) / max(1, len(self.notes))


def migrate_file(
    path: Path, library: str | None = None, *, devices: int | None = None
) -> Migration:
    """Reads a file; `devices`: on how many it was meant to run, where sizes are counted by them."""
    return translated(read_source(path, library), devices)


def translated(source: Source, devices: int | None = None) -> Migration:
    """What was read from a file, as a configuration with its notes."""
    module = MODULES[source.library]
    draft = Draft(source.library, module.method_of(source), dict(source.settings))
    draft.remarks += source.remarks
    table = load_table(source.library)
    for key, value in source.settings.items():
        _apply(draft, key, value, table.find(key, draft.method))
    module.finish(draft, source, devices)
    for row in table.rows:
        _apply_default(draft, row)
    _fill_in(draft, source)
    settle(draft)
    return Migration(
        source.path,
        LIBRARIES[source.library],
        draft.method,
        draft.tree,
        tuple(draft.notes.values()),
        tuple(draft.remarks),
        {key: theirs for key, theirs in draft.defaults.items() if draft.is_set(key)},
    )


def _apply(draft: Draft, key: str, value: Any, row: KeyRow | None) -> None:
    if isinstance(value, Unread):
        draft.given[key] = None
        ours = row.ours if row is not None else ""
        says = "only a run of the script could tell its value"
        if row is not None and row.state in ("nothing", "missing"):
            draft.notes[key] = Note(key, value, row.state, ours, row.says)
        else:
            draft.notes[key] = Note(key, value, "unread", ours, says)
        return
    if row is None:
        draft.notes[key] = Note(key, value, "unknown")
        return
    draft.notes[key] = Note(key, value, row.state, row.ours, row.says)
    if value is None or row.state in ("nothing", "missing") or row.read == "part":
        return
    ours = _read(row, value)
    if ours is not None:
        draft.put(row.ours, ours)
    elif row.values is not None and _spelled(value) not in row.values:
        known = ", ".join(row.values)
        draft.tell(key, "missing", says=f"{value} is not there; of theirs there are {known}")


def _apply_default(draft: Draft, row: KeyRow) -> None:
    """Their default, where they give no value and ours would be another."""
    value = row.default_for(draft.method)
    given = any(draft.get(name) is not None for name in row.theirs)
    if value is None or given or draft.is_set(row.ours):
        return
    if row.methods and draft.method not in row.methods:
        return
    draft.put(row.ours, _read(row, value))
    draft.defaults[row.ours] = row.theirs[0]


def _read(row: KeyRow, value: Any) -> Any:
    if row.values is not None:
        return row.values.get(_spelled(value))
    return not value if row.read == "not" else value


def _spelled(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _fill_in(draft: Draft, source: Source) -> None:
    """What every configuration of ours has."""
    if not draft.is_set("model.path"):
        draft.put("model.path", "org/model")
        draft.remarks.append("no model is named in the file: write model.path")
    if not draft.is_set("data.source"):
        draft.put("data.source", "rows.jsonl")
        draft.remarks.append("no data is named in the file: write data.source")
    if not draft.is_set("train.steps") and not draft.is_set("train.epochs"):
        draft.put("train.epochs", 1)
        draft.remarks.append("the file does not say how long to train: one epoch is written")
    if not draft.is_set("run.dir"):
        draft.put("run.dir", f"runs/{source.path.stem}")
