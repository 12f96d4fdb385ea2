"""What is wrong with a configuration, told to somebody at a terminal."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from reinforge.core.errors import InputError


def refuse(errors: Sequence[str]) -> None:
    if errors:
        raise InputError(
            "\n  - ".join([f"{len(errors)} problems:", *errors]) if len(errors) > 1 else errors[0]
        )


@contextmanager
def named_as(options: Mapping[str, str]) -> Iterator[None]:
    """Errors speak of a command's options where they would speak of keys of a configuration, which
    who gave the command may never have seen.
    """

    def renamed(text: str | None) -> str | None:
        for key, option in options.items():
            text = text and re.sub(rf"\b{re.escape(key)}\b", option, text)
        return text

    try:
        yield
    except InputError as error:
        told = renamed(error.what) or ""
        raise InputError(told, where=renamed(error.where), fix=renamed(error.fix)) from error


def warn(warnings: Sequence[str]) -> None:
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
