"""`reinforge data`: what a run makes of rows, and rows from a teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from reinforge.cli.data_page import print_data
from reinforge.cli.make import app as make_app
from reinforge.config.algorithm import AlgorithmConfig
from reinforge.config.data import DataConfig
from reinforge.config.data_source import is_config, source_config
from reinforge.config.model import ModelConfig
from reinforge.core.errors import InputError
from reinforge.core.hub import offline

MOST = 10_000  # rows that are looked at unless all are asked for

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Show what a run would make of data, or have a teacher make some.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(make_app, name="make")


@app.command()
def show(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A file, a hub data set, a generator, or a configuration whose data are meant.",
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings, e.g. data.format=hh."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="M", help="Whose tokenizer and chat template: hub id or directory."),
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(metavar="A", help="What is to be trained; default: what the format is for."),
    ] = None,
    rows: Annotated[int, typer.Option(metavar="N", min=0, help="Rows to show.")] = 3,
    full: Annotated[bool, typer.Option("--full", help="Show whole texts, however long.")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help=f"Look at all rows, not the first {MOST:,}.")
    ] = False,
) -> None:
    """Show rows as a run would have them.

    Their format, columns and rendered text with what is trained marked, how
    long they are, and which would be dropped or cut, and why. The exit code is
    2 where no row at all can be used.

    [bold]Examples[/bold]

      reinforge data show alpaca.jsonl --model HuggingFaceTB/SmolLM2-135M-Instruct

      reinforge data show tatsu-lab/alpaca --rows 5

      reinforge data show my.yaml data.max_length=512
    """
    data, of_model, how, new_tokens = _settings(source, overrides or [], model, algorithm)
    if of_model is not None and not Path(of_model.path).expanduser().exists():
        offline()  # before the hub's libraries are imported: they would try for a minute, aloud
    from reinforge.offline.data_view import view_data

    view = view_data(
        data,
        of_model,
        rows=rows,
        most=None if everything else MOST,
        algorithm=how,
        **({} if new_tokens is None else {"new_tokens": new_tokens}),
    )
    print_data(view, full=full)
    if view.bad and not view.usable:
        raise typer.Exit(InputError.exit_code)


def _settings(
    source: str, overrides: list[str], model: str | None, algorithm: str | None
) -> tuple[DataConfig, ModelConfig | None, AlgorithmConfig | None, int | None]:
    """The sections that matter, and the tokens of an answer, from a configuration or for a source
    alone.
    """
    named = AlgorithmConfig(name=algorithm) if algorithm is not None else None
    loaded = source_config(source, overrides, model=model, where="reinforge data show")
    if is_config(source):
        new = loaded.rollout.max_new_tokens
        return loaded.data, loaded.model, named or loaded.algorithm, new
    return loaded.data, loaded.model if model is not None else None, named, None
