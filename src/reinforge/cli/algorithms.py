"""The command `algorithms`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from reinforge.algorithms.catalogue import describe, printed
from reinforge.cli.show import print_table


def algorithms(
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List the algorithms: the parts each is made of, its own defaults, its paper.

    [bold]Examples[/bold]

      reinforge algorithms

      reinforge algorithms --json
    """
    if as_json:
        print(json.dumps(describe(), indent=2))
    else:
        print_table(printed())
