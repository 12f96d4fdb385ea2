"""Commands that are imported when they are called.

A group has a table of its commands: where each one is, and its first line for the help page. So
`reinforge --help` imports none of them, and the module of a command imports at its top all that is
light. What needs torch is imported by the command itself, when it has checked what it was given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """A command in the table of its group."""

    place: str  # module:function, or module:app of a group
    summary: str  # the first line of its help page


class LazyGroup(TyperGroup):
    """A group of commands, made by Typer from a subclass that has the table.

    Its `commands` are stand-ins that have a name and a summary: enough for the help page, for the
    completion of words and for a suggestion after a misspelling.
    """

    entries: ClassVar[Mapping[str, CommandEntry]] = {}
    called: ClassVar[Mapping[str, str]] = {}  # commands by other names that people try

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        for name, entry in self.entries.items():
            self.add_command(TyperCommand(name, help=entry.summary))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is called, instead of its stand-in."""
        if meant := self.called.get(args[0]):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {meant!r}?")
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None and name in self.entries:
            command = self.load(name)
        return name, command, rest

    def load(self, name: str) -> Any:
        """The command of that name, imported."""
        module, _, attribute = self.entries[name].place.partition(":")
        found = getattr(import_module(module), attribute)
        if isinstance(found, typer.Typer):
            return typer.main.get_command(found)
        alone = typer.Typer(rich_markup_mode="rich", add_completion=False)
        alone.command(name)(found)
        return typer.main.get_command(alone)
