"""Commands that train: `train`, and `sft`, which needs no configuration."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated

import typer

from reinforge.build.run import train_config
from reinforge.cli.arguments import ConfigFile, Overrides
from reinforge.cli.problems import named_as, refuse, warn
from reinforge.cli.quick import described, sft_config
from reinforge.cli.show import print_mapping, print_table, print_text
from reinforge.config.pipeline import Pipeline, load_any
from reinforge.config.schema import Config
from reinforge.core.errors import InputError
from reinforge.loops.finished import finished_run
from reinforge.pipelines.plan import first_phase
from reinforge.pipelines.run import run_pipeline
from reinforge.plan.hub import not_here
from reinforge.plan.preflight import preflight
from reinforge.watch.pipeline import show_pipeline

SFT_OPTIONS = {
    "run.dir": "--out",
    "train.epochs": "--epochs",
    "adapter.rank": "--lora",
    "train.learning_rate": "--learning-rate",
    "train.prompts_per_step": "--batch-size",
}


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
    """One run to its end, if nothing speaks against it. A run that is finished needs nothing."""
    if not _finished(loaded):
        found = preflight(loaded)
        warn(found.warnings)
        refuse(found.errors)
        if loaded.cluster.kind == "local":
            refuse(not_here(loaded))
    train_config(loaded)


def _finished(loaded: Config) -> bool:
    """Whether nothing is left to do. A finished run of other settings is none of this one's: the
    checks refuse its directory, with whatever else is wrong.
    """
    try:
        return finished_run(loaded) is not None
    except InputError:
        return False


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
            min=1,
            metavar="RANK",
            help="Train an adapter of this rank instead of all weights: faster, and less memory.",
        ),
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(metavar="RATE", help="Default: 1e-5, with --lora 2e-4."),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Rows a step; default: 16, fewer of few rows."),
    ] = None,
) -> None:
    """Fine-tune a model on rows of your own, without a configuration.

    A row is {"prompt", "completion"}, {"messages"}, {"text"}, or has Alpaca's
    or ShareGPT's columns.

    A twentieth of the rows is held out (of 40 rows or more). The same command
    goes on after a stop. The run's config.json has all settings.

    [bold]Examples[/bold]

      reinforge sft HuggingFaceTB/SmolLM2-135M-Instruct rows.jsonl

      reinforge sft org/base rows.jsonl --lora 16 --epochs 3 --learning-rate 1e-4

      reinforge sft org/base texts.jsonl data.loss_on=all
    """

    def say(text: str) -> None:
        warn([text])

    with named_as(SFT_OPTIONS):
        config = sft_config(
            model,
            data,
            out=out,
            epochs=epochs,
            lora=lora,
            learning_rate=learning_rate,
            batch_size=batch_size,
            overrides=overrides or [],
            say=say,
        )
        print_text(described(config))
        _train_run(config)


def _train_pipeline(pipeline: Pipeline, force: Sequence[str]) -> None:
    found, _ = first_phase(pipeline, force)
    warn(found.warnings)
    refuse(found.errors)
    result = run_pipeline(pipeline, force)
    print_table(show_pipeline(result.run_dir))
    print_mapping({"report": result.report})
