"""The sections `rollout.structured` and `eval.structured`: the form that every answer must have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from reinforge.config.base import Section
from reinforge.core.constraint import Constraint
from reinforge.core.errors import InputError

GRAMMAR_FILES = (".lark", ".gbnf", ".ebnf")
SHORT = 60  # characters


class StructuredConfig(Section):
    """One of its keys says what every answer must match as a whole."""

    regex: str | None = Field(
        None, description="A regular expression, without look-around and references back."
    )
    json_schema: dict[str, Any] | str | None = Field(
        None, description="A JSON schema, or the path of a .json file with one."
    )
    json_object: bool = Field(False, description="Any JSON object.")
    grammar: str | None = Field(
        None,
        description=(
            "A grammar in Lark's notation, or in GBNF's as llama.cpp has it: its text, or the path"
            f" of a file ({', '.join(GRAMMAR_FILES)})."
        ),
    )

    @model_validator(mode="after")
    def _one(self) -> StructuredConfig:
        given = [name for name, value in self if value not in (None, False)]
        if len(given) != 1:
            names = ", ".join(type(self).model_fields)
            raise ValueError(
                f"structured: {' and '.join(given) or 'nothing'} given; give one of {names}"
            )
        return self

    def constraint(self, where: str) -> Constraint:
        """What an engine is asked for; files are read. `where`: the section's key."""
        if self.regex is not None:
            return Constraint("regex", self.regex)
        if isinstance(self.json_schema, str):
            return Constraint("json_schema", _text(self.json_schema, f"{where}.json_schema"))
        if self.json_schema is not None:
            return Constraint("json_schema", json.dumps(self.json_schema))
        if self.grammar is not None:
            if self.grammar.endswith(GRAMMAR_FILES):
                return Constraint("grammar", _text(self.grammar, f"{where}.grammar"))
            return Constraint("grammar", self.grammar)
        return Constraint("json_object")

    def key(self, where: str) -> str:
        """Of what is given, e.g. rollout.structured.regex."""
        return f"{where}.{next(name for name, value in self if value not in (None, False))}"

    def shown(self, where: str) -> str:
        """For people: the key and what it says, in one short line."""
        value = next(value for _, value in self if value not in (None, False))
        if value is True:
            return self.key(where)
        text = " ".join((value if isinstance(value, str) else json.dumps(value)).split())
        return f"{self.key(where)}: {text if len(text) <= SHORT else text[: SHORT - 3] + '...'}"


def _text(path: str, where: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "it is no text"
        raise InputError(
            f"cannot read {path}: {said}.", where=where, fix=f"Paths are relative to {Path.cwd()}."
        ) from None
