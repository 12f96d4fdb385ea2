"""The command `plan`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from reinforge.cli.arguments import ConfigFile, Overrides
from reinforge.cli.problems import warn
from reinforge.cli.show import console, print_mapping, print_table
from reinforge.config.load import load_config
from reinforge.core.errors import EXIT_BAD_INPUT
from reinforge.pipelines.plan import describe_pipeline
from reinforge.pipelines.plan import plan as make_plan
from reinforge.plan.options import PlanOptions, stated_gpu
from reinforge.plan.plan import describe, describe_deep, prompt_tokens
from reinforge.plan.simulate import COLUMNS, gpu_counts, plan_cluster


def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    deadline: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help="Seconds for the data and reward checks; default: 30, with --deep 120.",
            min=1,
        ),
    ] = None,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep",
            help=(
                "Also prove template and tokenizer on the rows, do one step with a toy of the"
                " model, and say what fits and what would help."
            ),
        ),
    ] = False,
    cluster: Annotated[
        bool,
        typer.Option("--cluster", help="Instead: step time and best layout on 8 to 1024 GPUs."),
    ] = False,
    gpus: Annotated[
        str, typer.Option(help="--cluster: how many GPUs, e.g. 8..1024 or 8,24.")
    ] = "8..1024",
    gpu: Annotated[
        str | None,
        typer.Option(
            help=(
                "Predict for this GPU, whatever is here: H100, A100:40 or a size in GiB; with"
                " --cluster the run's or H100 where none is named."
            )
        ),
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

      reinforge plan recipe:chain_sum --deep --gpu L4

      reinforge plan recipe:chain_sum --cluster --gpus 8..256 --from runs/chain-sum
    """
    if cluster:
        _plan_cluster(config, overrides or [], as_json, gpus=gpus, gpu=gpu, run=run, length=length)
        return
    if gpu is not None:
        stated_gpu(gpu)
    options = PlanOptions(deep=deep, gpu=gpu)
    report = make_plan(config, overrides or [], deadline=deadline, options=options)
    if as_json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        if "stages" in report.summary:
            print_table(describe_pipeline(report))
            for stage in report.summary["stages"]:
                _print_deep(stage.get("deep"), f"stage {stage['stage']}")
        else:
            print_mapping(dict(describe(report)))
            _print_deep(report.summary.get("deep"))
        warn(report.warnings)
        for error in report.errors:
            print(f"error: {error}", file=sys.stderr)
        if report.ok:
            count = len(report.warnings)
            warned = f", {count} warning{'s' if count > 1 else ''}" if count else ""
            console().print(f"[green]ok[/green]{warned}")
    if not report.ok:
        raise typer.Exit(EXIT_BAD_INPUT)


def _print_deep(found: dict[str, Any] | None, title: str = "") -> None:
    """The proofs, one a line, then what fits and what would help."""
    if found is None:
        return
    out = console()
    out.print()
    if title:
        out.print(f"[bold]{title}[/bold]")
    lines = {
        f"{'ok' if proof['ok'] else 'failed':<6}  {proof['name']}": proof["said"]
        for proof in found["proofs"]
    }
    print_mapping(lines)
    out.print()
    print_mapping(dict(describe_deep(found)))


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
    loaded = load_config(config, overrides)
    counts = gpu_counts(gpus)
    prompt = None if run is not None else prompt_tokens(config, overrides)
    found = plan_cluster(loaded, counts, gpu=gpu, run=run, length=length, prompt=prompt)
    if as_json:
        print(json.dumps(found.as_dict(), indent=2))
        return
    print_mapping(found.assumed)
    print_table(found.rows())
    console().print()
    print_mapping(COLUMNS)
