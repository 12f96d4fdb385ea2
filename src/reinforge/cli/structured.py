"""Options that say what form answers must have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from reinforge.cli.arguments import read_text
from reinforge.core.constraint import Constraint
from reinforge.core.errors import InputError

FORM = "The form of answers"
Regex = Annotated[
    str | None,
    typer.Option(rich_help_panel=FORM, help="Every answer matches this regular expression."),
]
JsonSchema = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", rich_help_panel=FORM, help="Every answer is JSON that fits this schema."
    ),
]
JsonObject = Annotated[
    bool, typer.Option("--json-object", rich_help_panel=FORM, help="Every answer is a JSON object.")
]
Grammar = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        rich_help_panel=FORM,
        help="Every answer is a sentence of this grammar (Lark or GBNF).",
    ),
]


def constraint_of(
    regex: str | None, json_schema: Path | None, json_object: bool, grammar: Path | None
) -> tuple[Constraint, str] | None:
    """What the options ask for, and the option that does; None: nothing."""
    found: list[tuple[Constraint, str]] = []
    if regex is not None:
        found.append((Constraint("regex", regex), "--regex"))
    if json_schema is not None:
        found.append(
            (Constraint("json_schema", read_text(json_schema, "--json-schema")), "--json-schema")
        )
    if json_object:
        found.append((Constraint("json_object"), "--json-object"))
    if grammar is not None:
        found.append((Constraint("grammar", read_text(grammar, "--grammar")), "--grammar"))
    if len(found) > 1:
        names = " and ".join(option for _, option in found)
        raise InputError(f"an answer has one form, not {names}.", where=names, fix="Give one.")
    return found[0] if found else None
