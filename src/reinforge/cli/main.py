"""The command line.

Commands parse and print; the work is elsewhere and is imported only by the command that needs it.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reinforge.cli import check, launch, model, runs
from reinforge.cli.show import console, print_mapping, print_table
from reinforge.core.errors import EXIT_BAD_INPUT, InputError, ReinforgeError, Terminated
from reinforge.version import __version__

if TYPE_CHECKING:
    from reinforge.config.pipeline import Pipeline
    from reinforge.config.schema import Config

EXIT_INTERRUPTED = 130
# they import torch, or read models
SLOW = (
    "train",
    "sft",
    "plan",
    "demo",
    "eval",
    "generate",
    "chat",
    "serve",
    "export",
    "tiny",
    "check",
)

app = typer.Typer(
    name="reinforge",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Post-training for language models, from instruction tuning to reinforcement learning.",
    epilog=(
        "Start with [bold]reinforge demo[/bold], then [bold]reinforge plan CONFIG[/bold] and"
        " [bold]reinforge train CONFIG[/bold]."
    ),
)

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


def _version(wanted: bool) -> None:
    if wanted:
        print(f"reinforge {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Show the traceback of an error. Works anywhere on the line."),
    ] = False,
) -> None:
    """`--debug` is taken out of the line by `main`; it stands here for the help page."""


@app.command()
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    force_stage: Annotated[
        list[str] | None,
        typer.Option(
            "--force-stage", metavar="NAME", help="Of a pipeline: run this finished stage again."
        ),
    ] = None,
) -> None:
    """Run a configuration or a pipeline of several, or continue it from its newest checkpoint.

    Ctrl-C or SIGTERM saves a checkpoint; the same command then continues, on
    a CPU bit for bit.

    [bold]Examples[/bold]

      reinforge train recipe:chain_sum

      reinforge train recipe:chain_sum train.steps=10 run.dir=runs/short

      reinforge train recipe:pipeline
    """
    from reinforge.config.pipeline import Pipeline, load_any

    # torchrun: rank 0 drives
    if int(os.environ.get("RANK", "0")) > 0 and "MASTER_ADDR" in os.environ:
        from reinforge.backends.distributed.ranks import serve

        serve()
    loaded = load_any(config, overrides or [])
    if isinstance(loaded, Pipeline):
        _train_pipeline(loaded, force_stage or [])
        return
    if force_stage:
        raise InputError(
            f"{config} is one run and has no stages.",
            where="--force-stage",
            fix="Use another run.dir to run it again.",
        )
    _train_run(loaded)


def _train_run(loaded: Config) -> None:
    """One run to its end, if nothing speaks against it."""
    from reinforge.plan.hub import not_here
    from reinforge.plan.preflight import preflight

    found = preflight(loaded)
    _warn(found.warnings)
    _refuse(found.errors)
    if loaded.cluster.kind == "local":
        _refuse(not_here(loaded))
    from reinforge.build.run import train_config

    train_config(loaded)


@app.command()
def sft(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub id or directory.")],
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="Your rows: a .jsonl, .json, .csv or .parquet file, or a hub data set id.",
        ),
    ],
    overrides: Overrides = None,
    out: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="The run's directory; default: runs/sft-MODEL-DATA."),
    ] = None,
    epochs: Annotated[
        float, typer.Option(metavar="N", min=0.001, help="Passes over the rows.")
    ] = 1.0,
    lora: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="RANK", help="Train an adapter of this rank instead of all weights."
        ),
    ] = None,
) -> None:
    """Fine-tune a model on rows of your own, without a configuration.

    A row is {"prompt", "completion"}, {"messages"}, {"text"}, or has Alpaca's
    or ShareGPT's columns.

    A twentieth of the rows is held out (of 40 rows or more). The same command
    goes on after a stop. The run's config.json has all settings.

    [bold]Examples[/bold]

      reinforge sft HuggingFaceTB/SmolLM2-135M-Instruct rows.jsonl

      reinforge sft org/base rows.jsonl --lora 16 --epochs 3 train.learning_rate=1e-4

      reinforge sft org/base texts.jsonl data.loss_on=all
    """
    from reinforge.cli.quick import sft_config

    def say(text: str) -> None:
        _warn([text])

    _train_run(
        sft_config(
            model, data, out=out, epochs=epochs, lora=lora, overrides=overrides or [], say=say
        )
    )


@app.command()
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
    from reinforge.pipelines.plan import describe_pipeline
    from reinforge.pipelines.plan import plan as make_plan
    from reinforge.plan.plan import describe

    report = make_plan(config, overrides or [], deadline=deadline)
    if as_json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        if "stages" in report.summary:
            print_table(describe_pipeline(report))
        else:
            print_mapping(dict(describe(report)))
        _warn(report.warnings)
        for error in report.errors:
            print(f"error: {error}", file=sys.stderr)
        if report.ok:
            warned = f", {len(report.warnings)} warnings" if report.warnings else ""
            console().print(f"[green]ok[/green]{warned}")
    if not report.ok:
        raise typer.Exit(EXIT_BAD_INPUT)


@app.command()
def schema(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="The reference page instead of the JSON schema.")
    ] = False,
) -> None:
    """Print the JSON schema of configurations, for editors, or their reference page.

    [bold]Examples[/bold]

      reinforge schema > reinforge.schema.json

      reinforge schema --markdown > docs/configuration.md
    """
    from reinforge.config.reference import json_schema, reference_markdown

    print(reference_markdown() if markdown else json.dumps(json_schema(), indent=2))


@app.command()
def algorithms(
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List the algorithms: the parts each is made of, its own defaults, its paper.

    [bold]Examples[/bold]

      reinforge algorithms

      reinforge algorithms --json
    """
    from reinforge.algorithms.catalogue import describe, printed

    if as_json:
        print(json.dumps(describe(), indent=2))
    else:
        print_table(printed())


@app.command()
def recipes(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Print this recipe instead of the list.")
    ] = None,
    copy: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Copy all of them to a new directory.")
    ] = None,
) -> None:
    """List the configurations that come with reinforge.

    Every command that takes CONFIG takes recipe:NAME.

    [bold]Examples[/bold]

      reinforge recipes

      reinforge recipes algorithms/grpo > grpo.yaml

      reinforge recipes --copy recipes

      reinforge train recipe:chain_sum model.path=./my-model
    """
    from reinforge.config.recipes import copy_recipes, recipe_names, recipe_path, summary

    if copy is not None:
        copy_recipes(copy)
        print(f"copied {len(recipe_names())} recipes to {copy}")
    elif name is not None:
        print(recipe_path(name).read_text(encoding="utf-8"), end="")
    else:
        print_table([{"recipe": each, "what it does": summary(each)} for each in recipe_names()])


@app.command()
def demo(
    dir: Annotated[Path, typer.Option(help="Where the demo's model and runs go.")] = Path(
        "runs/demo"
    ),
    seed: Annotated[int, typer.Option(help="Seed of the demo.")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="A minute instead of several; learns less.")
    ] = False,
) -> None:
    """Train a small model from nothing, on this machine, and show what it learned.

    [bold]Examples[/bold]

      reinforge demo

      reinforge demo --quick --dir /tmp/demo
    """
    from reinforge.cli.demo import run_demo

    run_demo(dir, seed, quick)


model.register(app)
launch.register(app, check.app)
app.add_typer(runs.app, name="runs")
app.add_typer(check.app, name="check")


def _train_pipeline(pipeline: Pipeline, force: Sequence[str]) -> None:
    from reinforge.pipelines.plan import first_phase
    from reinforge.pipelines.run import run_pipeline
    from reinforge.watch.pipeline import show_pipeline

    found, _ = first_phase(pipeline, force)
    _warn(found.warnings)
    _refuse(found.errors)
    result = run_pipeline(pipeline, force)
    print_table(show_pipeline(result.run_dir))
    print_mapping({"report": result.report})


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
    from reinforge.config.load import load_config
    from reinforge.plan.simulate import gpu_counts, plan_cluster

    found = plan_cluster(
        load_config(config, overrides), gpu_counts(gpus), gpu=gpu, run=run, length=length
    )
    if as_json:
        print(json.dumps(found.as_dict(), indent=2))
        return
    print_mapping(found.assumed)
    print_table(found.rows())


def _refuse(errors: Sequence[str]) -> None:
    if errors:
        raise InputError(
            "\n  - ".join([f"{len(errors)} problems:", *errors]) if len(errors) > 1 else errors[0]
        )


def _warn(warnings: Sequence[str]) -> None:
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """The console entry point.

    Returns the exit code: 0 done, 2 bad input, 3 stopped itself, 130 Ctrl-C, 143 SIGTERM, 1 a bug.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    greet(args)
    code = _run([a for a in args if a != "--debug"], debug="--debug" in args)
    _let_go_of_dead_output()
    return code


def _run(args: Sequence[str], *, debug: bool) -> int:
    command = typer.main.get_command(app)
    # typer turns wrong usage, Ctrl-C and a closed pipe into SystemExit; the rest comes through
    try:
        command.main(list(args), prog_name="reinforge")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        # where a terminal has closed nobody hears it, and the exit code is still the error's
        with suppress(OSError):
            sys.stderr.write(traceback.format_exc() if debug else f"{_paragraph(error)}\n")
        return error.exit_code if isinstance(error, ReinforgeError) else 1
    return 0


def _let_go_of_dead_output() -> None:
    """Where a terminal or pipe is gone, what Python would flush at its end goes nowhere: otherwise
    its exit code would be that of the flush.
    """
    try:
        sys.stderr.flush()
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for number in (1, 2):
            os.dup2(nowhere, number)
        os.close(nowhere)


def greet(args: Sequence[str]) -> None:
    """A line at once, before anything is imported, for somebody who has just pressed Enter."""
    if (
        args
        and args[0] in SLOW
        and not {"-h", "--help"} & set(args)
        and sys.stderr.isatty()
        and os.environ.get("RANK", "0") == "0"
    ):
        print(f"reinforge {__version__}: {' '.join(args)}", file=sys.stderr, flush=True)


def _paragraph(error: Exception) -> str:
    if isinstance(error, Terminated):
        return str(error)  # it was asked to end, and did
    if isinstance(error, ReinforgeError):
        return f"error: {error}"
    lines = str(error).strip().splitlines()
    return (
        f"unexpected {type(error).__name__}{': ' + lines[0] if lines else ''} (run again with"
        " --debug for the traceback)"
    )
