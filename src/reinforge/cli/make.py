"""`reinforge data make`: training data from documents or prompts, by a teacher."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from reinforge.api import make_data
from reinforge.cli.arguments import Temperature, TopP, read_text
from reinforge.cli.option_groups import grouped
from reinforge.cli.progress import progress_bar
from reinforge.cli.server_options import (
    KEY,
    SCORES,
    ApiKeyEnv,
    JudgeAddress,
    JudgeMode,
    JudgeModel,
    JudgePrompt,
    ModelName,
    Parallel,
    Rate,
)
from reinforge.cli.show import print_text

if TYPE_CHECKING:
    from reinforge.offline.make_data import DataMade

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Have a teacher make training data.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

CHOICE = "Which are kept"
ASKED = "Documents and questions"
Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings, e.g. data.columns.prompt=query."),
]
Prompts = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="Prompts: a file, a hub data set, a generator, or a configuration with data.",
    ),
]
Documents = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="Documents: a directory of .txt, .md and .jsonl files, or rows with a `text`.",
    ),
]
Teacher = Annotated[
    str,
    typer.Option(
        metavar="M",
        help=(
            "Hub id, directory, .gguf file or run; or the address of an OpenAI-compatible server,"
            " http://127.0.0.1:8000/v1."
        ),
    ),
]
Out = Annotated[Path, typer.Option(help="The .jsonl or .parquet file to make.")]
Samples = Annotated[int, typer.Option("-n", metavar="N", help="Answers per prompt.", min=1)]
Longest = Annotated[int, typer.Option(metavar="N", help="Longest reply, in tokens.", min=1)]
Seed = Annotated[int, typer.Option(metavar="N", help="The same seed gives the same text.")]
Adapter = Annotated[
    str | None, typer.Option(metavar="DIR", help="A saved adapter to put on the teacher.")
]
Rewards = Annotated[
    list[str] | None,
    typer.Option(
        rich_help_panel=SCORES,
        help=(
            "Score answers with this reward: a built-in one, file.py:function, or a .yaml"
            " configuration, for all of its rewards. May be given again."
        ),
    ),
]
KeepCut = Annotated[
    bool,
    typer.Option(
        "--keep-cut", rich_help_panel=CHOICE, help="Keep answers that ran into --max-new-tokens."
    ),
]
LONGEST_EXAMPLE = 160  # characters
REASONS = {  # why something was left out
    "repeated prompt": "asked the same as an earlier one",
    "refused": "were refused by the teacher",
    "empty": "were empty",
    "no text": "had half a surrogate pair in them, which is no text",
    "cut": "ran into --max-new-tokens",
    "unscored": "got no score",
    "low score": "scored below --at-least",
    "not best": "were not among the --best of their prompt",
    "repeated answer": "repeated another answer to their prompt",
    "no pair": "prompts had no two answers that differ by more than --margin",
    "repeated pair": "pairs repeated another one",
    "no JSON": "had no JSON in them",
    "no pairs": "had JSON without questions",
    "no question": "pairs had no question",
    "no answer": "pairs had no answer",
    "too many": "questions were more than --questions",
    "repeated question": "questions repeated an earlier one",
}


@dataclass(frozen=True)
class AskingOptions:
    """How a teacher is asked. The commands get one from `grouped`."""

    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    max_new_tokens: Longest = 1024
    seed: Seed = 0
    adapter: Adapter = None
    model_name: ModelName = None
    api_key_env: ApiKeyEnv = KEY
    parallel: Parallel = 16
    rate: Rate = None

    def settings(self) -> dict[str, Any]:
        """As `make_data` takes them."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        key = os.environ.get(given.pop("api_key_env")) or None
        return {**given, "api_key": key}


@dataclass(frozen=True)
class ScoringOptions:
    """Who says which answers are good. The commands get one from `grouped`."""

    reward: Rewards = None
    judge: JudgeAddress = None
    judge_model: JudgeModel = None
    judge_mode: JudgeMode = "score"
    judge_prompt: JudgePrompt = None

    def settings(self) -> dict[str, Any]:
        """As `make_data` takes them."""
        return {
            "rewards": _rewards(self.reward),
            "judge": self.judge,
            "judge_model": self.judge_model,
            "judge_mode": self.judge_mode,
            "judge_prompt": _text(self.judge_prompt, "--judge-prompt"),
        }


@app.command()
@grouped
def answers(
    source: Prompts,
    teacher: Teacher,
    out: Out,
    overrides: Settings = None,
    n: Samples = 1,
    *,
    asking: AskingOptions,
    scoring: ScoringOptions,
    at_least: Annotated[
        float | None,
        typer.Option(metavar="N", rich_help_panel=CHOICE, help="Keep answers with this score."),
    ] = None,
    best: Annotated[
        int | None,
        typer.Option(
            metavar="N", rich_help_panel=CHOICE, help="Keep so many of each prompt.", min=1
        ),
    ] = None,
    keep_cut: KeepCut = False,
) -> None:
    """Have a teacher answer prompts, as rows for SFT.

    With a score only good answers are kept: rejection sampling (--at-least) and
    best-of-n (--best).

    What was answered is kept beside the file: the same command after a kill asks
    only for the rest, and another choice among answers asks for nothing.

    [bold]Examples[/bold]

      reinforge data make answers questions.jsonl --out made.jsonl \\
        --teacher http://127.0.0.1:8000/v1

      reinforge data make answers openai/gsm8k data.options.name=main \\
        --teacher my-model --out made.jsonl -n 8 --reward math --at-least 1
    """
    with progress_bar() as progress:
        made = make_data(
            "answers",
            source,
            out,
            teacher=teacher,
            n=n,
            **asking.settings(),
            **scoring.settings(),
            at_least=at_least,
            best=best,
            keep_cut=keep_cut,
            overrides=overrides or [],
            progress=progress,
        )
    _tell(made, "answers", "prompts")


@app.command()
@grouped
def questions(
    source: Documents,
    teacher: Teacher,
    out: Out,
    overrides: Settings = None,
    most: Annotated[
        int,
        typer.Option(
            "--questions", metavar="N", rich_help_panel=ASKED, help="Questions per chunk.", min=1
        ),
    ] = 3,
    chunk: Annotated[
        int,
        typer.Option(metavar="N", rich_help_panel=ASKED, help="Characters of a chunk.", min=2),
    ] = 4000,
    overlap: Annotated[
        int,
        typer.Option(
            metavar="N",
            rich_help_panel=ASKED,
            help="Characters that a chunk shares with the next.",
            min=0,
        ),
    ] = 400,
    template: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=ASKED,
            help="What the teacher is asked instead: with {text}, and perhaps {n}.",
        ),
    ] = None,
    free_form: Annotated[
        bool,
        typer.Option(
            "--free-form",
            rich_help_panel=ASKED,
            help="Do not hold the teacher to JSON: for servers that cannot.",
        ),
    ] = False,
    *,
    asking: AskingOptions,
) -> None:
    """Have a teacher ask and answer questions about documents, as rows for SFT.

    Documents are cut into chunks, and the teacher replies to each with questions
    and their answers, as JSON. A reply that cannot be read is counted and told.

    [bold]Examples[/bold]

      reinforge data make questions handbook/ --out made.jsonl \\
        --teacher http://127.0.0.1:8000/v1

      reinforge data make questions articles.jsonl data.columns.text=body \\
        --teacher my-model --out made.jsonl --questions 5 --template ask.txt
    """
    with progress_bar() as progress:
        made = make_data(
            "questions",
            source,
            out,
            teacher=teacher,
            questions=most,
            chunk=chunk,
            overlap=overlap,
            template=_text(template, "--template"),
            structured=not free_form,
            **asking.settings(),
            overrides=overrides or [],
            progress=progress,
        )
    _tell(made, "replies", "chunks")


@app.command()
@grouped
def pairs(
    source: Prompts,
    teacher: Teacher,
    out: Out,
    overrides: Settings = None,
    n: Samples = 4,
    *,
    asking: AskingOptions,
    scoring: ScoringOptions,
    rule: Annotated[
        Literal["best-worst", "all"],
        typer.Option(
            "--pairs",
            rich_help_panel=CHOICE,
            help="The best against the worst answer, or every two that differ.",
        ),
    ] = "best-worst",
    margin: Annotated[
        float,
        typer.Option(
            metavar="N",
            rich_help_panel=CHOICE,
            help="Answers of a pair must differ by more than this.",
            min=0,
        ),
    ] = 0.0,
    keep_cut: KeepCut = False,
) -> None:
    """Have a teacher answer prompts several times, as pairs for preference losses.

    A reward or a judge says which answer is better.

    [bold]Examples[/bold]

      reinforge data make pairs questions.jsonl --teacher my-model \\
        --out made.jsonl -n 4 --judge http://127.0.0.1:8000/v1

      reinforge data make pairs recipe:chain_sum --teacher my-model \\
        --out made.jsonl -n 8 --reward exact_match
    """
    with progress_bar() as progress:
        made = make_data(
            "pairs",
            source,
            out,
            teacher=teacher,
            n=n,
            **asking.settings(),
            **scoring.settings(),
            pairs=rule,
            margin=margin,
            keep_cut=keep_cut,
            overrides=overrides or [],
            progress=progress,
        )
    _tell(made, "answers", "prompts")


def _rewards(named: list[str] | None) -> Any:
    """One configuration stands alone; names are a list."""
    return named[0] if named and len(named) == 1 else named


def _text(path: Path | None, option: str) -> str | None:
    return None if path is None else read_text(path, option)


def _tell(made: DataMade, completions: str, asked: str) -> None:
    """What came out, what was left out and why, and what to do next."""
    lines = [
        f"{len(made.rows):,} rows in {made.path}, from {made.completions:,} {completions} to"
        f" {made.asked:,} {asked}"
    ]
    width = max((len(f"{count:,}") for count in made.dropped.values()), default=0)
    if made.dropped:
        lines.append("left out:")
    for reason, count in sorted(made.dropped.items(), key=lambda item: -item[1]):
        example = made.examples[reason]
        shown = example if len(example) <= LONGEST_EXAMPLE else f"{example[:LONGEST_EXAMPLE]}…"
        lines.append(f"  {count:>{width},} {REASONS[reason]}, e.g. {shown}")
    lines += [
        f"all {completions}: {made.raw}; how they were made: {made.manifest_file}",
        f"look at it: reinforge data show {made.path} --model M",
    ]
    print_text("\n".join(lines))
