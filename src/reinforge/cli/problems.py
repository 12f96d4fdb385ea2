"""What is wrong with a configuration, told to somebody at a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from reinforge.core.errors import InputError


def refuse(errors: Sequence[str]) -> None:
    if errors:
        raise InputError(
            "\n  - ".join([f"{len(errors)} problems:", *errors]) if len(errors) > 1 else errors[0]
        )


def warn(warnings: Sequence[str]) -> None:
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
