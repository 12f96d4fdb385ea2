"""The command `plan`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from reinforge.cli.arguments import ConfigFile, Overrides
from reinforge.cli.problems import warn
from reinforge.cli.show import console, print_mapping, print_table
from reinforge.config.load import load_config
from reinforge.core.errors import EXIT_BAD_INPUT
from reinforge.pipelines.plan import describe_pipeline
from reinforge.pipelines.plan import plan as make_plan
from reinforge.plan.plan import describe
from reinforge.plan.simulate import gpu_counts, plan_cluster


def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    deadline: Annotated[
        float,
        typer.Option(metavar="S", help="Seconds for the data and reward checks.", min=1),
    ] = 30.0,
    cluster: Annotated[
        bool,
        typer.Option("--cluster", help="Instead: step time and best layout on 8 to 1024 GPUs."),
    ] = False,
    gpus: Annotated[
        str, typer.Option(help="--cluster: how many GPUs, e.g. 8..1024 or 8,24.")
    ] = "8..1024",
    gpu: Annotated[
        str | None, typer.Option(help="--cluster: which, e.g. H100; default: the run's, or H100.")
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="RUN", help="--cluster: a run on GPUs whose times are the measure."
        ),
    ] = None,
    length: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            min=1,
            help=(
                "--cluster: mean tokens of a completion; default: the run's, or half of the limit."
            ),
        ),
    ] = None,
) -> None:
    """Find what is wrong with a configuration before a model is loaded.

    Exit code 0: it would run; 2: it would not, and every reason is listed.

    [bold]Examples[/bold]

      reinforge plan recipe:chain_sum

      reinforge plan recipe:chain_sum model.path=./my-model --json

      reinforge plan recipe:chain_sum --cluster --gpus 8..256 --from runs/chain-sum
    """
    if cluster:
        _plan_cluster(config, overrides or [], as_json, gpus=gpus, gpu=gpu, run=run, length=length)
        return
    report = make_plan(config, overrides or [], deadline=deadline)
    if as_json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        if "stages" in report.summary:
            print_table(describe_pipeline(report))
        else:
            print_mapping(dict(describe(report)))
        warn(report.warnings)
        for error in report.errors:
            print(f"error: {error}", file=sys.stderr)
        if report.ok:
            warned = f", {len(report.warnings)} warnings" if report.warnings else ""
            console().print(f"[green]ok[/green]{warned}")
    if not report.ok:
        raise typer.Exit(EXIT_BAD_INPUT)


def _plan_cluster(
    config: Path,
    overrides: Sequence[str],
    as_json: bool,
    *,
    gpus: str,
    gpu: str | None,
    run: Path | None,
    length: float | None,
) -> None:
    found = plan_cluster(
        load_config(config, overrides), gpu_counts(gpus), gpu=gpu, run=run, length=length
    )
    if as_json:
        print(json.dumps(found.as_dict(), indent=2))
        return
    print_mapping(found.assumed)
    print_table(found.rows())
