"""Arguments that several commands take, and how a file that one names is read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from reinforge.config.strict import scalar
from reinforge.core.errors import InputError

ConfigFile = Annotated[
    Path,
    typer.Argument(metavar="CONFIG", help="A YAML file, or recipe:NAME (`reinforge recipes`)."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="Settings that replace those of the file, e.g. train.steps=10."
    ),
]
Temperature = Annotated[
    float, typer.Option("--temperature", "-t", metavar="N", help="0 = greedy.", min=0)
]
TopP = Annotated[
    float,
    typer.Option(
        metavar="N",
        help="Nucleus: sample from the most likely tokens that hold this much probability.",
        min=0,
        max=1,
    ),
]
MaxNewTokens = Annotated[int, typer.Option(metavar="N", help="Longest completion.", min=1)]
RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]


def read_text(path: Path, option: str) -> str:
    """What is in a file that an option names."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "it is no text"
        raise InputError(f"cannot read {path}: {said}.", where=option, fix="Give a file.") from None


def named_values(given: Sequence[str], where: str) -> dict[str, str | int | float]:
    """NAME=VALUE, several with commas between them, or several times.

    >>> named_values(["helpfulness=4,verbosity=0"], "--fixed")
    {'helpfulness': 4, 'verbosity': 0}
    """
    found: dict[str, str | int | float] = {}
    for item in (part for text in given for part in text.split(",")):
        name, equals, text = item.strip().partition("=")
        value = scalar(text.strip(), where=where) if equals else None
        if not name or isinstance(value, bool) or not isinstance(value, str | int | float):
            raise InputError(f"{item!r} is not NAME=VALUE.", where=where, fix="e.g. helpfulness=4")
        found[name] = value
    return found
