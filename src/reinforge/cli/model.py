"""Commands that use a model or make one: eval, chat, export, tiny, demo."""

from __future__ import annotations

import importlib.util
import json
import math
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from reinforge.api import evaluate as evaluate_model
from reinforge.cli.arguments import MaxNewTokens, Temperature, TopP
from reinforge.cli.show import print_mapping
from reinforge.config.recipes import is_recipe
from reinforge.core.errors import InputError
from reinforge.models.tiny import check_architecture
from reinforge.watch.evaluation_news import NOTHING_SCORED
from reinforge.watch.view import BarView, SteadyConsole

TOY = "runs/tiny"  # where the recipes look for it
Architecture = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help=(
            "Of the model: llama, qwen3_5 (layers keep state), gpt_oss (sinks, experts) or"
            " qwen3_moe (experts)."
        ),
    ),
]


def evaluate(
    config_or_run: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG_OR_RUN",
            help=(
                "A configuration, or the directory of a run (its newest checkpoint). With --runner"
                " lm_eval also any model."
            ),
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings that replace those of the file."),
    ] = None,
    runner: Annotated[
        str, typer.Option(help="native, or lm_eval: tasks of lm-evaluation-harness on our engine.")
    ] = "native",
    tasks: Annotated[
        str | None, typer.Option(metavar="A,B", help="lm_eval: names of tasks.")
    ] = None,
    include: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="lm_eval: a directory with tasks of your own (YAML)."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="lm_eval: only the first rows of every task."),
    ] = None,
    fewshot: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, help="lm_eval: examples in the prompt; default: the task's."
        ),
    ] = None,
    as_chat: Annotated[
        bool, typer.Option("--chat", help="lm_eval: prompts through the model's chat template.")
    ] = False,
) -> None:
    """Measure a model on held-out rows, or on tasks of lm-evaluation-harness.

    The rows are those of its configuration.

    [bold]Examples[/bold]

      reinforge eval recipe:chain_sum

      reinforge eval runs/chain-sum eval.samples=8 eval.temperature=0.7

      reinforge eval runs/chain-sum --runner lm_eval --tasks arc_easy,gsm8k --limit 200
    """
    if runner == "lm_eval":
        _with_lm_eval(
            str(config_or_run),
            tasks,
            overrides,
            include=include,
            limit=limit,
            fewshot=fewshot,
            chat=as_chat,
        )
        return
    if (
        runner != "native"
        or any(x is not None for x in (tasks, include, limit, fewshot))
        or as_chat
    ):
        raise InputError(
            "--tasks, --include, --limit, --fewshot and --chat are for --runner lm_eval.",
            where="--runner",
            fix="There are: native, lm_eval.",
        )
    if not is_recipe(config_or_run) and not config_or_run.exists():
        raise InputError(
            f"no such file or directory: {config_or_run}.",
            where="CONFIG_OR_RUN",
            fix="Give a .yaml file, recipe:NAME or a run directory.",
        )
    found = evaluate_model(config_or_run, overrides or [])
    print_mapping({k: NOTHING_SCORED if math.isnan(v) else v for k, v in found.items()})


def _with_lm_eval(
    model: str, tasks: str | None, overrides: list[str] | None, **settings: Any
) -> None:
    """Metrics as `task/metric`, filters left out where there is none."""
    if not tasks:
        raise InputError(
            "which tasks?", where="--tasks", fix="Give names, e.g. --tasks arc_easy,gsm8k."
        )
    if overrides:
        raise InputError(
            f"{overrides[0]}: --runner lm_eval reads no configuration.",
            where="KEY=VALUE",
            fix="Remove it.",
        )
    if importlib.util.find_spec("lm_eval") is None:
        raise InputError(
            "lm_eval is not installed.", where="--runner", fix="pip install 'reinforge[lm-eval]'"
        )
    from reinforge.build.saved_model import open_model
    from reinforge.evals.lm_eval import run_tasks

    found = run_tasks(open_model(model)[0], [name.strip() for name in tasks.split(",")], **settings)
    print_mapping(
        {
            f"{task}/{key.removesuffix(',none')}": value
            for task, values in found.items()
            for key, value in values.items()
            if isinstance(value, int | float)
        }
    )


def chat(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_RUN", help="Hub id, directory, .gguf file, or the directory of a run."
        ),
    ],
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
    max_new_tokens: MaxNewTokens = 512,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
) -> None:
    """Talk to a model in the terminal.

    [bold]Examples[/bold]

      reinforge chat HuggingFaceTB/SmolLM2-135M-Instruct

      reinforge chat runs/chain-sum --temperature 0
    """
    from reinforge.cli.chat import chat as run

    run(model, temperature=temperature, top_p=top_p, max_new_tokens=max_new_tokens, system=system)


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT", help="The directory to write; it must not exist or be empty."
        ),
    ],
    checkpoint: Annotated[str, typer.Option(help="best, latest, or a step.")] = "latest",
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge the adapter into the weights.")
    ] = False,
    gguf: Annotated[
        str | None,
        typer.Option(
            "--gguf",
            metavar="PRECISION",
            help="Also write it as one file for llama.cpp: f16, bf16 or f32.",
        ),
    ] = None,
    push: Annotated[
        str | None,
        typer.Option(
            "--push",
            metavar="ID",
            help="Also upload it to this hub id (private). Needs HF_TOKEN or a login.",
        ),
    ] = None,
) -> None:
    """Write a run's model as an ordinary model directory that transformers and servers load.

    [bold]Examples[/bold]

      reinforge export runs/chain-sum exported

      reinforge export runs/chain-sum exported --merge --checkpoint best

      reinforge export runs/chain-sum exported --merge --gguf f16
    """
    if not run.is_dir():
        raise InputError(f"no such run directory: {run}.", where="RUN")
    if checkpoint not in ("best", "latest") and not checkpoint.isdecimal():
        raise InputError(
            f"{checkpoint!r} is no checkpoint.",
            where="--checkpoint",
            fix="Give best, latest or the number of a step.",
        )
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise InputError(
            f"{out} exists and is not empty.", where="OUT", fix="Choose another directory."
        )
    from reinforge.offline.export import export as write

    write(run, out, checkpoint=checkpoint, merge=merge, gguf=gguf, push=push)
    found = {
        "made": f"{out}, the {checkpoint_in_words(checkpoint)} checkpoint of {run}",
        "weights": weights_in_words(out),
    }
    files = sorted(str(file) for file in out.glob("*.gguf"))
    if files:
        found["for llama.cpp"] = ", ".join(files)
    print_mapping({**found, "next": f"reinforge chat {shlex.quote(str(out))}"})


def weights_in_words(out: Path) -> str:
    """Their size, and the precision that the model's own config names."""
    files = [*out.glob("*.safetensors"), *out.glob("*.bin")]
    size = sum(file.stat().st_size for file in files)
    config = out / "config.json"
    dtype = json.loads(config.read_text()).get("dtype") if config.is_file() else None
    room = f"{size / 1e6:,.0f} MB" if size >= 1e6 else f"{size / 1e3:,.0f} KB"
    return room + (f" in {dtype}" if dtype else "")


def checkpoint_in_words(checkpoint: str) -> str:
    """A checkpoint in words."""
    return {"latest": "newest", "best": "best"}.get(checkpoint, f"{checkpoint}.")


def tiny(
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT", help="The directory to write; it must not exist or be empty."
        ),
    ],
    seed: Annotated[int, typer.Option(help="Of the weights and of the demonstrations.")] = 0,
    context: Annotated[
        int,
        typer.Option(
            metavar="N", min=64, help="Tokens that it can read; games need more than sums."
        ),
    ] = 256,
    architecture: Architecture = "llama",
) -> None:
    """Make the small model that the recipes start from, in a minute or two.

    0.1 M parameters that half know how to add.

    [bold]Examples[/bold]

      reinforge tiny runs/tiny

      reinforge tiny runs/tiny-gpt-oss --architecture gpt_oss

      reinforge train recipe:algorithms/grpo
    """
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise InputError(
            f"{out} exists and is not empty.",
            where="OUT",
            fix="Choose another directory, or use the model that is there.",
        )
    check_architecture(architecture)
    typer.echo(
        f"making a {architecture} and teaching it sums: a minute or two, longer on a busy machine",
        err=True,
    )
    from reinforge.offline.starter_model import make_taught_model

    view = BarView(SteadyConsole(stderr=True, highlight=False), plain_every=50)
    make_taught_model(out, seed=seed, context=context, view=view, architecture=architecture)
    recipe = "reinforge train recipe:algorithms/grpo"
    path = shlex.quote(str(out))
    print_mapping(
        {
            "made": f"{out}, a {architecture} that gets some of its sums (3+4+5=) right",
            "next": recipe if path == TOY else f"{recipe} model.path={path}",
            "more": "reinforge recipes lists what else starts from it",
        }
    )


def demo(
    dir: Annotated[
        Path | None,
        typer.Option(
            help="Where the demo's model and runs go; default: runs/demo, --quick: runs/demo-quick."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the demo.")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="A minute instead of several; learns less.")
    ] = False,
    architecture: Architecture = "llama",
) -> None:
    """Train a small model from nothing, on this machine, and show what it learned.

    [bold]Examples[/bold]

      reinforge demo

      reinforge demo --architecture qwen3_5 --dir runs/demo-qwen3_5

      reinforge demo --quick --dir /tmp/demo
    """
    from reinforge.cli.demo import run_demo

    run_demo(dir or Path("runs/demo-quick" if quick else "runs/demo"), seed, quick, architecture)
