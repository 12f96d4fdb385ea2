"""The command `ui`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from reinforge.ui.options import KEY, AppOptions
from reinforge.ui.server import serve_app


def ui(
    root: Annotated[
        Path, typer.Argument(metavar="RUNS", help="The folder of runs, or one run.")
    ] = Path("runs"),
    host: Annotated[
        str, typer.Option(help="Address to listen on. Anything but loopback needs a token.")
    ] = AppOptions.host,
    port: Annotated[
        int, typer.Option(metavar="N", help="Port; 0 takes a free one.", min=0, max=65535)
    ] = AppOptions.port,
    token: Annotated[
        str | None,
        typer.Option(
            help=f"Browsers must show it. Better in {KEY}: others can see a command line."
        ),
    ] = None,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Look only: start, stop and change nothing.")
    ] = False,
    no_open: Annotated[
        bool, typer.Option("--no-open", help="Do not open the page in a browser.")
    ] = False,
) -> None:
    """Open runs in a browser: watch, question, start and stop them.

    Runs are processes of their own and go on when the app ends.

    [bold]Examples[/bold]

      reinforge ui

      reinforge ui runs/chain-sum --port 9000 --no-open
    """
    options = AppOptions(root=root, host=host, port=port, token=token, launching=not read_only)
    serve_app(options, show=not no_open)
