"""The command `score`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Annotated, Any

import typer

from reinforge.cli.arguments import named_values
from reinforge.cli.generate import checked_source
from reinforge.cli.show import print_table
from reinforge.config.load import load_config
from reinforge.core.errors import InputError

WEIGHTS = "--weights"


def score(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_CONFIG",
            help=(
                "A reward model: hub id, directory or run; or a .yaml configuration, whose rewards"
                " are taken."
            ),
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="The .jsonl file to write: the rows with their scores.")
    ],
    data: Annotated[
        str | None,
        typer.Option(
            help=(
                "A file with prompts and completions, or any source; default: the configuration's."
            ),
        ),
    ] = None,
    weights: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=N",
            help=(
                "Of attributes in the total, e.g. helpfulness=0.65,verbosity=-0.4; without them"
                " there is none."
            ),
        ),
    ] = None,
) -> None:
    """Label completions: every row of a file with what a reward model says of its completion.

    A model with several heads gives a column for each of its attributes.

    [bold]Examples[/bold]

      reinforge score runs/attributes --data answers.jsonl --out graded.jsonl

      reinforge score my-org/attribute-model --data answers.jsonl \\
        --out graded.jsonl --weights helpfulness=0.65,verbosity=-0.4

      reinforge score config.yaml --data answers.jsonl --out scored.jsonl
    """
    source = checked_source(data, out, "--data")
    config = load_config(Path(model)) if model.endswith((".yaml", ".yml")) else None
    if config is not None and not config.rewards:
        raise InputError("it has no rewards to score with.", where=model, fix="Add some.")
    if config is not None and weights:
        raise InputError(
            "the rewards of a configuration have weights of their own.",
            where=WEIGHTS,
            fix="Write them under rewards, options.weights.",
        )
    from reinforge.offline.score import score_file

    labels = score_file(model, source, out, config=config, weights=_numbers(weights))
    _tell(labels)
    print(f"{len(labels)} rows in {out}")


def _numbers(given: Sequence[str] | None) -> dict[str, float] | None:
    if not given:
        return None
    found: dict[str, float] = {}
    for name, value in named_values(given, WEIGHTS).items():
        if isinstance(value, str):
            raise InputError(f"{value!r} is no number.", where=f"{WEIGHTS} {name}")
        found[name] = float(value)
    return found


def _tell(labels: Sequence[Mapping[str, Any]]) -> None:
    """What was found of all rows, by column."""
    names = {name: None for label in labels for name in label if name != "rewards"}
    rows: list[dict[str, Any]] = []
    for name in names:
        found = [label[name] for label in labels if label.get(name) is not None]
        if found:
            spread = {"mean": fmean(found), "std": pstdev(found)}
            rows.append({"score": name, **spread, "min": min(found), "max": max(found)})
    print_table(rows, empty="nothing could be scored")
