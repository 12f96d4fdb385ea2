"""`reinforge check`: proves that parts of a run work before it costs anything."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from reinforge.check.learning import check as check_learning
from reinforge.check.rewards import check_rewards
from reinforge.cli.network import network
from reinforge.cli.show import print_mapping, print_table
from reinforge.config.load import load_config
from reinforge.core.hub import offline

DEFAULT = "learning"
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings that replace those of the file."),
]


class DefaultCommandGroup(TyperGroup):
    """`check` and `check CONFIG` mean `check learning`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = bool(args) and (args[0] in self.commands or args[0] in ("-h", "--help"))
        return super().parse_args(ctx, list(args) if named else [DEFAULT, *args])


app = typer.Typer(
    cls=DefaultCommandGroup,
    add_completion=False,
    rich_markup_mode="rich",
    help=(
        "Prove that the pipeline can learn, and that rewards cannot be cheated; tell what a chat"
        " template does.\n\n[bold]Examples[/bold]\n\n  reinforge check\n\n  reinforge check rewards"
        " recipe:chain_sum"
    ),
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command(DEFAULT)
def learning(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="Check with this configuration's model; default: a tiny one made on the spot."
        ),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Prove that the pipeline can learn: train on a trivial reward and see it rise.

    Also: `reinforge check`.

    [bold]Examples[/bold]

      reinforge check

      reinforge check recipe:chain_sum train.learning_rate=1e-4
    """
    loaded = load_config(config, overrides or []) if config else None
    print_mapping(check_learning(loaded))


@app.command()
def rewards(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="Its rewards are tried on its rows.")
    ],
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option(metavar="N", help="How many rows to try.", min=1)] = 16,
    allow: Annotated[
        float,
        typer.Option(
            metavar="N",
            help="Share of rows on which a hostile answer may be right by chance.",
            min=0,
            max=1,
        ),
    ] = 0.1,
    gold: Annotated[
        str | None,
        typer.Option(
            help=(
                "How a right answer is written, with {answer} in it; default: several ways are"
                " tried."
            )
        ),
    ] = None,
) -> None:
    """Try the rewards on right answers and on hostile ones.

    Hostile are: nothing, the question, every choice, ten thousand braces,
    injections.

    Exit code 1: a hostile answer gets full reward, makes a reward raise, or a
    right answer does not get it.

    [bold]Examples[/bold]

      reinforge check rewards recipe:chain_sum

      reinforge check rewards my.yaml --gold "<answer>{answer}</answer>"
    """
    loaded = load_config(config, overrides or [])
    found = check_rewards(loaded, rows=rows, allowed=allow, gold=gold)
    print_table(found.table())
    for name in found.left_out:
        print(f"{name}: not tried, a reward model has no highest score")
    if not found.ok:
        raise typer.Exit(1)


@app.command()
def template(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub id, directory or .gguf file.")],
    chat_template: Annotated[
        str | None,
        typer.Option(help="A name or a jinja file in place of the tokenizer's own template."),
    ] = None,
) -> None:
    """Tell what a chat template does to a conversation.

    Ends of turns, prefix property, history that it rewrites, tools.

    [bold]Examples[/bold]

      reinforge check template HuggingFaceTB/SmolLM2-135M-Instruct

      reinforge check template models/mine --chat-template mine.jinja
    """
    if not Path(model).expanduser().exists():
        offline()  # before the hub's libraries are imported: they would try for a minute, aloud
    from reinforge.check.template import check_template

    print_mapping(check_template(model, chat_template))


app.command()(network)
