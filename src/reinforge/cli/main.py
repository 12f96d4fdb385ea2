"""The command line: which commands there are, and what becomes of their errors.

Commands parse and print; the work is elsewhere. The module of a command is imported when it is
called.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

import typer

from reinforge.cli.lazy import CommandEntry, LazyGroup
from reinforge.core.errors import ReinforgeError, Terminated
from reinforge.version import __version__

EXIT_INTERRUPTED = 130
# they import torch, or read models
SLOW = (
    "train",
    "sft",
    "sweep",
    "plan",
    "demo",
    "eval",
    "benchmark",
    "generate",
    "score",
    "chat",
    "serve",
    "export",
    "tiny",
    "check",
    "data",
)
# of those: in a log they say themselves what they do, line by line
TELLING = ("train", "sft", "sweep", "demo")


class ReinforgeCommands(LazyGroup):
    """`reinforge`."""

    called = {
        "compare": "runs compare",
        "diagnose": "runs diagnose",
        "doctor": "runs diagnose",
        "evaluate": "eval",
        "show": "runs show",
    }
    entries = {
        "train": CommandEntry(
            "reinforge.cli.train:train",
            "Run a configuration or a pipeline of several, or continue it from its newest"
            " checkpoint.",
        ),
        "sft": CommandEntry(
            "reinforge.cli.train:sft",
            "Fine-tune a model on rows of your own, without a configuration.",
        ),
        "sweep": CommandEntry(
            "reinforge.cli.sweep:sweep",
            "Search for the best settings with many runs of a configuration.",
        ),
        "plan": CommandEntry(
            "reinforge.cli.plan:plan",
            "Find what is wrong with a configuration before a model is loaded.",
        ),
        "schema": CommandEntry(
            "reinforge.cli.configs:schema",
            "Print the JSON schema of configurations, for editors, or their reference page.",
        ),
        "algorithms": CommandEntry(
            "reinforge.cli.algorithms:algorithms",
            "List the algorithms: the parts each is made of, its own defaults, its paper.",
        ),
        "models": CommandEntry(
            "reinforge.cli.models:models",
            "Show which architectures are supported, by which engine, backend and feature.",
        ),
        "migrate": CommandEntry(
            "reinforge.cli.migrate:migrate",
            "Make a configuration of a script or file of TRL, veRL, OpenRLHF, LLaMA-Factory or"
            " NeMo-RL.",
        ),
        "recipes": CommandEntry(
            "reinforge.cli.configs:recipes",
            "List the configurations that come with reinforge.",
        ),
        "demo": CommandEntry(
            "reinforge.cli.model:demo",
            "Train a small model from nothing, on this machine, and show what it learned.",
        ),
        "generate": CommandEntry(
            "reinforge.cli.generate:generate",
            "Complete every prompt of a file, with labels and preference pairs where they"
            " are wanted.",
        ),
        "score": CommandEntry(
            "reinforge.cli.score:score",
            "Label completions: every row of a file with what a reward model says of its"
            " completion.",
        ),
        "eval": CommandEntry(
            "reinforge.cli.model:evaluate",
            "Measure a model on held-out rows, or on tasks of lm-evaluation-harness.",
        ),
        "benchmark": CommandEntry(
            "reinforge.cli.benchmark:benchmark",
            "Measure a model on known benchmarks: gsm8k, math, mmlu, ifeval, humaneval.",
        ),
        "chat": CommandEntry(
            "reinforge.cli.model:chat",
            "Talk to a model in the terminal.",
        ),
        "serve": CommandEntry(
            "reinforge.cli.serve:serve",
            "Serve a model over HTTP with the OpenAI API, or the scores of a reward model.",
        ),
        "export": CommandEntry(
            "reinforge.cli.model:export",
            "Write a run's model as an ordinary model directory that transformers and"
            " servers load.",
        ),
        "tiny": CommandEntry(
            "reinforge.cli.model:tiny",
            "Make the small model that the recipes start from, in a minute or two.",
        ),
        "launch": CommandEntry(
            "reinforge.cli.launch:launch",
            "Run a configuration on this machine, a Ray cluster, Slurm or Kubernetes.",
        ),
        "data": CommandEntry(
            "reinforge.cli.data:app",
            "Show what a run would make of data, or have a teacher make some.",
        ),
        "runs": CommandEntry(
            "reinforge.cli.runs:app",
            "Show, compare, diagnose and replay runs.",
        ),
        "ui": CommandEntry(
            "reinforge.cli.ui:ui",
            "Open runs in a browser: watch, question, start and stop them.",
        ),
        "check": CommandEntry(
            "reinforge.cli.check:app",
            "Prove that the pipeline can learn, and that rewards cannot be cheated; tell"
            " what a chat template does.",
        ),
    }


app = typer.Typer(
    cls=ReinforgeCommands,
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
    """A line at once, before anything is imported, for somebody who has just pressed Enter, or who
    reads a log. It is on standard error: results are on the other one.
    """
    if (
        args
        and args[0] in SLOW
        and not {"-h", "--help"} & set(args)
        and (args[0] not in TELLING or sys.stderr.isatty())
        and os.environ.get("RANK", "0") == "0"
    ):
        print(f"reinforge {__version__}: {' '.join(_unsecret(args))}", file=sys.stderr, flush=True)


SECRETS = ("key", "token", "secret", "password")  # in names of options and settings


def _unsecret(args: Sequence[str]) -> list[str]:
    """What was asked for, without values that nobody wants in a log.

    >>> _unsecret(["serve", "M", "--api-key", "sk-1", "tracker.api_key=sk-2", "--max-new-tokens=5"])
    ['serve', 'M', '--api-key', '***', 'tracker.api_key=***', '--max-new-tokens=5']
    """
    told: list[str] = []
    hidden = False
    for arg in args:
        name, equals, _ = arg.partition("=")
        last = name.lower().replace("-", "_").split(".")[-1].split("_")[-1]
        if hidden:
            told.append("***")
        elif equals and last in SECRETS:
            told.append(f"{name}=***")
        else:
            told.append(arg)
        hidden = not hidden and not equals and arg.startswith("--") and last in SECRETS
    return told


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
