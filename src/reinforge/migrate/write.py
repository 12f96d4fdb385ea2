"""A migrated configuration as YAML, and what is said about it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from reinforge.config.sections import Sections
from reinforge.migrate.draft import Note
from reinforge.migrate.table import State
from reinforge.migrate.translate import Migration

TITLES: dict[State, str] = {
    "unknown": "not known",
    "unread": "not read",
    "missing": "no counterpart",
    "differs": "means something else here",
    "nothing": "nothing to set here",
    "same": "mapped",
}
WIDTH = 100
FIRST = ("path", "name", "source", "dir", "kind")  # keys that stand first in their section
LONGEST = 48  # of a value in the report


def yaml_of(migration: Migration) -> str:
    """The configuration, its sections in the order of the reference page."""
    config = migration.config
    ordered = {name: _ordered(config[name]) for name in Sections.model_fields if name in config}
    body = yaml.safe_dump(
        ordered, sort_keys=False, width=WIDTH, default_flow_style=None, allow_unicode=True
    )
    return f"# Made of {migration.path.name} ({migration.library}) by reinforge migrate.\n{body}"


def report_of(migration: Migration) -> Iterator[str]:
    """What became of every key, those that need a look first."""
    counts = migration.counts()
    told = ", ".join(f"{counts[state]} {title}" for state, title in TITLES.items() if counts[state])
    what = f"{migration.path.name}: {migration.library}, {migration.method}"
    yield f"{what}; {len(migration.notes)} keys: {told}"
    for remark in migration.remarks:
        yield from _wrapped(f"! {remark}", "  ")
    for state, title in TITLES.items():
        notes = [note for note in migration.notes if note.state == state]
        if notes:
            yield ""
            yield f"{title}:"
            for alike in _alike(notes):
                yield from _wrapped(f"  {_line(alike)}", "      ")
    if migration.defaults:
        yield ""
        yield "their defaults, written because ours are others:"
        for ours, theirs in migration.defaults.items():
            yield f"  {theirs} -> {ours}"


def _alike(notes: Sequence[Note]) -> list[list[Note]]:
    """Keys of which the same is said, together."""
    groups: dict[tuple[str, str], list[Note]] = {}
    for i, note in enumerate(notes):
        # where nothing is said, each stands by itself
        groups.setdefault((note.ours, note.says or str(i)), []).append(note)
    return list(groups.values())


def _line(notes: Sequence[Note]) -> str:
    first = notes[0]
    keys = ", ".join(f"{note.theirs} = {_short(note.value)}" for note in notes)
    arrow = f" -> {first.ours}" if first.ours else ""
    says = f": {first.says}" if first.says else ""
    return f"{keys}{arrow}{says}"


def _ordered(value: Any) -> Any:
    """What a section is of comes first in it."""
    if isinstance(value, list):
        return [_ordered(item) for item in value]
    if not isinstance(value, dict):
        return value
    names = sorted(value, key=lambda name: name not in FIRST)
    return {name: _ordered(value[name]) for name in names}


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
