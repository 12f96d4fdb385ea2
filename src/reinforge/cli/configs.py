"""Commands that tell of configurations: schema, recipes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from reinforge.cli.show import print_table
from reinforge.config.recipes import copy_recipes, recipe_names, recipe_path, summary
from reinforge.config.reference import json_schema, reference_markdown


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
    print(reference_markdown() if markdown else json.dumps(json_schema(), indent=2))


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
    if copy is not None:
        copy_recipes(copy)
        print(f"copied {len(recipe_names())} recipes to {copy}")
    elif name is not None:
        print(recipe_path(name).read_text(encoding="utf-8"), end="")
    else:
        print_table([{"recipe": each, "what it does": summary(each)} for each in recipe_names()])
