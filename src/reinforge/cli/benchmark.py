"""The command `benchmark`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reinforge.api import benchmark as run_benchmark
from reinforge.cli.arguments import TopP
from reinforge.cli.progress import progress_bar
from reinforge.cli.server_options import (
    KEY,
    ApiKeyEnv,
    ModelName,
    Parallel,
    Rate,
    ServerUrl,
    server_of,
)
from reinforge.cli.show import print_mapping, print_table
from reinforge.core.errors import InputError
from reinforge.evals.benchmarks.table import PRESETS, preset_of

if TYPE_CHECKING:
    from reinforge.evals.benchmarks.result import BenchmarkResult, MetricValue

SHOWN = 12  # rows of groups that are printed


def benchmark(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_RUN",
            help=(
                "Hub id, directory (also of an adapter), .gguf file or run; with --server a name"
                " of your own."
            ),
        ),
    ],
    tasks: Annotated[
        str, typer.Option(metavar="A,B", help=f"One or more of: {', '.join(PRESETS)}.")
    ],
    rows: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROWS",
            help=(
                "A .jsonl or .parquet file, a directory with TASK.jsonl for each task, or a hub id;"
                " TASK=ROWS for one of several tasks. Default: the hub."
            ),
        ),
    ] = None,
    shots: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROWS",
            help="The same for the examples of few-shot prompts; in a directory TASK.shots.jsonl.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help=(
                "The directory for results.json and TASK.jsonl. Default: benchmarks in the run, or"
                " benchmarks/MODEL here."
            )
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Only the first rows of every task.")
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--plain",
            help=(
                "Ask in a conversation, or with a text to continue. Default: by whether the model"
                " has a chat template."
            ),
        ),
    ] = None,
    fewshot: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, help="Examples in the prompt. Default: plain the usual, chat none."
        ),
    ] = None,
    n: Annotated[
        int, typer.Option("-n", metavar="N", min=1, help="Answers to each row, for pass@N.")
    ] = 1,
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", "-t", metavar="N", min=0, help="Default: 0, greedy."),
    ] = None,
    top_p: TopP = 1.0,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Longest answer. Default: the benchmark's."),
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same answers.")] = 0,
    adapter: Annotated[
        str | None, typer.Option(help="A saved adapter to put on the model.")
    ] = None,
    checkpoint: Annotated[str, typer.Option(help="Of a run: best, latest, or a step.")] = "latest",
    server: ServerUrl = None,
    model_name: ModelName = None,
    api_key_env: ApiKeyEnv = KEY,
    parallel: Parallel = 16,
    rate: Rate = None,
) -> None:
    """Measure a model on known benchmarks: gsm8k, math, mmlu, ifeval, humaneval.

    Every answer, its verdict and why are a line of OUT/TASK.jsonl. The same
    command after a kill asks only for the rest.

    [bold]Examples[/bold]

      reinforge benchmark HuggingFaceTB/SmolLM2-135M-Instruct \\
        --tasks gsm8k,ifeval --limit 200

      reinforge benchmark runs/chain-sum --tasks gsm8k --rows gsm8k.jsonl

      reinforge benchmark my-model --tasks mmlu --plain --rows mmlu=test.parquet \\
        --shots mmlu=dev.parquet

      reinforge benchmark my-model --tasks humaneval -n 10 -t 0.8 \\
        --server http://127.0.0.1:8000/v1
    """
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise InputError(
            "which benchmarks?", where="--tasks", fix=f"There are: {', '.join(PRESETS)}."
        )
    for name in names:
        preset_of(name)
    folder = out or _folder(model)
    with progress_bar() as progress:
        results = run_benchmark(
            model,
            names,
            rows=_given(rows, names, "--rows"),
            shots=_given(shots, names, "--shots"),
            out=folder,
            limit=limit,
            fewshot=fewshot,
            chat=chat,
            n=n,
            temperature=temperature,
            top_p=top_p,
            max_new_tokens=max_new_tokens,
            seed=seed,
            adapter=adapter,
            checkpoint=checkpoint,
            server=(
                None
                if server is None
                else server_of(server, model_name, api_key_env, parallel, rate)
            ),
            progress=progress,
        )
    _show(results, folder)


def _folder(model: str) -> Path:
    path = Path(model)
    if (path / "checkpoints").is_dir():
        return path / "benchmarks"
    return Path("benchmarks") / (path.name or "model")


def _given(given: list[str] | None, tasks: list[str], option: str) -> Any:
    """`TASK=ROWS`, or rows alone."""
    if not given:
        return None
    by: dict[str, str] = {}
    alone: list[str] = []
    for item in given:
        task, equals, path = item.partition("=")
        if equals and task in PRESETS:
            by[task] = path
        else:
            alone.append(item)
    if not alone:
        return by
    if len(alone) > 1 or by:
        raise InputError(
            f"{alone[0]}: whose rows are these?",
            where=option,
            fix=f"Write {tasks[0]}={alone[0]}, or give one directory for all tasks.",
        )
    return alone[0]


def _show(results: Mapping[str, BenchmarkResult], folder: Path) -> None:
    lines = []
    for result in results.values():
        for name, found in result.metrics.items():
            lines.append(
                {
                    "task": result.task if name == result.metric else "",
                    "metric": name,
                    **_numbers(found),
                    "rows": result.rows if name == result.metric else "",
                    "prompt": _prompt(result) if name == result.metric else "",
                }
            )
    print_table(lines)
    for result in results.values():
        for column, groups in result.groups.items():
            if 1 < len(groups) <= SHOWN:
                print()
                print_table(
                    [{f"{result.task} {column}": k, **_numbers(v)} for k, v in groups.items()]
                )
    print()
    notes = {
        f"{result.task} {what}": f"{count} of {result.rows * result.samples} answers{why}"
        for result in results.values()
        for what, count, why in (
            ("cut", result.cut, ": raise --max-new-tokens"),
            ("unscored", result.unscored, " could not be judged; they are left out"),
        )
        if count
    }
    records = ", ".join(str(folder / f"{result.task}.jsonl") for result in results.values())
    print_mapping({**notes, "records": records, "results": folder / "results.json"})


def _numbers(found: MetricValue) -> dict[str, str]:
    return {"value": f"{found.value:.1%}", "95%": f"{found.low:.1%} to {found.high:.1%}"}


def _prompt(result: BenchmarkResult) -> str:
    return f"{result.settings['prompt']}, {result.settings['fewshot']}-shot"
