"""The command `check network`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from reinforge.cli.show import print_mapping
from reinforge.cluster.network import report
from reinforge.core.errors import InputError


def network(
    ranks: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=2,
            help="Processes of the test on this machine; default: one per GPU, or 2.",
        ),
    ] = None,
    megabytes: Annotated[
        int, typer.Option(metavar="N", min=1, help="Size of what is reduced.")
    ] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Look for the usual mistakes in the network's settings, and measure an all-reduce.

    Under torchrun or srun: over all of their ranks.

    Exit code 2: something is set that cannot work.

    [bold]Examples[/bold]

      reinforge check network

      srun --nodes 2 --ntasks-per-node 8 reinforge check network
    """
    found = report(ranks, megabytes)
    if found is None:  # a rank other than 0
        return
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        print_mapping(
            {key: value for key, value in found.items() if key not in ("errors", "warnings")}
        )
        for kind in ("warnings", "errors"):
            for line in found[kind]:
                typer.echo(f"{kind[:-1]}: {line}", err=True)
    if found["errors"]:
        raise typer.Exit(InputError.exit_code)
