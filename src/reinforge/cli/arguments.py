"""Arguments that several commands take, and how a file that one names is read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
