"""The command `runs diagnose`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from reinforge.cli.arguments import RunDir
from reinforge.cli.show import print_text
from reinforge.watch.doctor.page import diagnose as diagnose_run
from reinforge.watch.doctor.page import diagnosis


def diagnose(
    run: RunDir, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """Say what is wrong with a run: the first cause, its evidence, the knob to turn.

    What follows from it stands below, and whether the run learns. The same
    rules warn while a run goes; run.doctor says what each of them does.

    [bold]Examples[/bold]

      reinforge runs diagnose runs/chain-sum

      reinforge runs diagnose runs/chain-sum --json
    """
    if as_json:
        print(json.dumps(diagnose_run(run), indent=2, default=str))
    else:
        print_text(diagnosis(run))
