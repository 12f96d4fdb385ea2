"""The command `generate`."""

from __future__ import annotations

import json
import os
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from reinforge.cli.arguments import Temperature, TopP, named_values
from reinforge.cli.server_options import (
    A_SERVER,
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
    ServerUrl,
    server_of,
)
from reinforge.cli.structured import Grammar, JsonObject, JsonSchema, Regex, constraint_of
from reinforge.config.load import load_config
from reinforge.config.schema import Config
from reinforge.core.aio import run_sync
from reinforge.core.errors import InputError
from reinforge.core.row import prompt_text
from reinforge.core.visible import visible
from reinforge.data.readers import kind_of
from reinforge.models.constraint_library import check as check_constraint

# of the answers that are shown at the end, and how much of each
SHOWN = 3
SHOWN_LENGTH = 80

Longest = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help=(
            "Longest completion; default: the configuration's or run's rollout.max_new_tokens, else"
            " 256."
        ),
        min=1,
    ),
]
Prompts = Annotated[
    str | None,
    typer.Option(
        "--prompts",
        "--data",
        help=(
            "A .jsonl file with a `prompt` per line, text or messages, or any source; default: the"
            " configuration's."
        ),
    ),
]


def generate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_CONFIG",
            help=(
                "Hub id, directory, .gguf file or run; or a .yaml configuration, whose model, data"
                " and rewards are taken."
            ),
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="The .jsonl file to write: the rows with their completions.")
    ],
    prompts: Prompts = None,
    n: Annotated[int, typer.Option("-n", metavar="N", help="Completions per prompt.", min=1)] = 1,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    max_new_tokens: Longest = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    adapter: Annotated[
        str | None, typer.Option(help="A saved adapter to put on the model.")
    ] = None,
    fixed: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=N",
            help="A column with the same value in every row: an attribute that is wanted.",
        ),
    ] = None,
    regex: Regex = None,
    json_schema: JsonSchema = None,
    json_object: JsonObject = False,
    grammar: Grammar = None,
    server: ServerUrl = None,
    model_name: ModelName = None,
    api_key_env: ApiKeyEnv = KEY,
    parallel: Parallel = 16,
    rate: Rate = None,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw",
            rich_help_panel=A_SERVER,
            help="Have the server continue text prompts, without a chat template.",
        ),
    ] = False,
    logprobs: Annotated[
        bool,
        typer.Option(
            "--logprobs/--no-logprobs",
            rich_help_panel=A_SERVER,
            help="Ask the server for log-probs.",
        ),
    ] = True,
    token_ids: Annotated[
        bool,
        typer.Option(
            "--token-ids",
            rich_help_panel=A_SERVER,
            help="Ask the server for token ids (reinforge and vLLM give them).",
        ),
    ] = False,
    rewards: Annotated[
        bool,
        typer.Option(
            "--rewards",
            rich_help_panel=SCORES,
            help="Score completions with the configuration's rewards.",
        ),
    ] = False,
    judge: JudgeAddress = None,
    judge_model: JudgeModel = None,
    judge_mode: JudgeMode = "score",
    judge_prompt: JudgePrompt = None,
    pairs: Annotated[
        Literal["best-worst", "all"] | None,
        typer.Option(
            rich_help_panel=SCORES,
            help="Also write preference pairs to OUT.pairs.jsonl, by reward or judge.",
        ),
    ] = None,
    margin: Annotated[
        float,
        typer.Option(
            metavar="N",
            rich_help_panel=SCORES,
            help="Completions of a pair must differ by more than this.",
            min=0,
        ),
    ] = 0.0,
) -> None:
    """Complete every prompt of a file, with labels and preference pairs where they are wanted.

    What was answered is kept: the same command after a kill asks only for the
    rest.

    [bold]Examples[/bold]

      reinforge generate HuggingFaceTB/SmolLM2-135M-Instruct \\
        --prompts prompts.jsonl --out out.jsonl -n 4

      reinforge generate recipe:chain_sum --out out.jsonl -n 8 --rewards --pairs best-worst

      reinforge generate my-model --data prompts.jsonl --out out.jsonl \\
        --json-schema answer.json

      reinforge generate my-model --server http://127.0.0.1:8000/v1 \\
        --data prompts.jsonl --out out.jsonl
    """
    source = checked_source(prompts, out, "--prompts")
    config: Config | None = None
    if model.endswith((".yaml", ".yml")):
        config = load_config(Path(model))
        model = config.model.path
        adapter = adapter or (config.adapter.path if config.adapter else None)
    more: dict[str, Any] = {} if config is None else {"config": config}
    if fixed:
        more["fixed"] = named_values(fixed, "--fixed")
    form = constraint_of(regex, json_schema, json_object, grammar)
    if form is not None:
        more["constraint"] = form[0]
        if server is None:
            check_constraint(*form)
    key = os.environ.get(api_key_env) or None
    if server is not None:
        more |= {
            "server": server_of(server, model_name, api_key_env, parallel, rate),
            "raw": raw,
            "logprobs": logprobs,
            "token_ids": token_ids,
        }
    if rewards or judge or pairs:
        from reinforge.cli.labels import label_options

        more["labelling"] = label_options(
            model,
            config,
            rewards,
            judge,
            judge_model,
            key,
            parallel,
            rate,
            judge_mode,
            judge_prompt,
            pairs,
            margin,
            n,
        )
    from reinforge.offline.generate import generate_file

    rows = run_sync(
        generate_file(
            model,
            source,
            out,
            n=n,
            temperature=temperature,
            top_p=top_p,
            max_new_tokens=max_new_tokens,
            seed=seed,
            adapter=adapter,
            **more,
        )
    )
    _show_first(out)
    print(f"{rows} rows in {out}")
    if form is not None:
        _tell_cut(out)
    if pairs:
        _tell_pairs(out)


def _show_first(out: Path) -> None:
    """What came of the first prompts."""
    with out.open(encoding="utf-8") as lines:
        for line in islice(lines, SHOWN):
            row = json.loads(line)
            prompt = visible(prompt_text(row["prompt"]), SHOWN_LENGTH)
            print(f"  {prompt} -> {visible(str(row['completion']), SHOWN_LENGTH)}")


def _tell_cut(out: Path) -> None:
    """Answers that ended before their form did."""
    with out.open(encoding="utf-8") as lines:
        stops = [json.loads(line)["stop"] for line in lines]
    cut = stops.count("length")
    if cut:
        print(
            f"{cut} of {len(stops)} answers were cut before their form was complete: raise"
            " --max-new-tokens, or give a form that ends (docs/structured.md)"
        )


def _tell_pairs(out: Path) -> None:
    from reinforge.offline.generate import pairs_path

    made = pairs_path(out)
    with made.open(encoding="utf-8") as lines:
        print(f"{sum(1 for _ in lines)} pairs in {made}")


def checked_source(prompts: str | None, out: Path, where: str) -> Path | str | None:
    """The prompts' file, checked, or the name of another source."""
    if prompts is None or not kind_of(prompts).startswith("."):
        return prompts
    path = Path(prompts)
    if not path.is_file():
        raise InputError(
            f"no such file: {path}.",
            where=where,
            fix="Give a .jsonl file with a `prompt` per line.",
        )
    if out.exists() and out.samefile(path):
        raise InputError(
            f"{out} is the file that is read.", where="--out", fix="Write to another file."
        )
    return path
