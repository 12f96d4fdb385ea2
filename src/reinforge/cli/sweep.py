"""`reinforge sweep`: the best settings for a run, found by many."""

from __future__ import annotations

import importlib.util
import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reinforge.cli.arguments import ConfigFile, Overrides
from reinforge.cli.problems import warn
from reinforge.cli.show import print_mapping, print_table, print_text
from reinforge.config.sweep import read_sweep
from reinforge.core.errors import InputError
from reinforge.sweeps.plan import SweepPlan, plan_sweep

if TYPE_CHECKING:
    from reinforge.sweeps.run import SweepResult


class Sampler(StrEnum):
    tpe = "tpe"
    random = "random"
    grid = "grid"


class Pruner(StrEnum):
    median = "median"
    asha = "asha"
    none = "none"


class SweepDirection(StrEnum):
    maximize = "maximize"
    minimize = "minimize"


class KeepCheckpoints(StrEnum):
    best = "best"
    all = "all"


def sweep(
    config: ConfigFile,
    overrides: Overrides = None,
    over: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=RANGE",
            help="A key and its range: log:1e-6..1e-4, float:0..1, int:1..8, logint:1..64,"
            " choice:a,b. May be given often.",
        ),
    ] = None,
    space: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A YAML file with `over` and the settings below."),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Runs in all. Default: 20; grid: every point."),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="What is compared. Default: eval/reward for RL, else eval/loss."
        ),
    ] = None,
    direction: Annotated[
        SweepDirection | None,
        typer.Option(metavar="WAY", help="maximize or minimize. Default: by the metric's name."),
    ] = None,
    sampler: Annotated[
        Sampler | None, typer.Option(metavar="KIND", help="tpe (default), random or grid.")
    ] = None,
    pruner: Annotated[
        Pruner | None, typer.Option(metavar="KIND", help="median (default), asha or none.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Of what is drawn. Default: 0.")
    ] = None,
    dir: Annotated[
        Path | None, typer.Option(help="The sweep's directory. Default: run.dir with -sweep.")
    ] = None,
    keep: Annotated[
        KeepCheckpoints,
        typer.Option(metavar="WHICH", help="Whose checkpoints stay: best, or all."),
    ] = KeepCheckpoints.best,
) -> None:
    """Search for the best settings with many runs of a configuration.

    Each trial is a run in DIR/trial-NNN. Those that do badly on held-out rows
    end early (eval.every says how often they are looked at). Ctrl-C saves the
    trial under way; the same command goes on.

    [bold]Examples[/bold]

      reinforge sweep recipe:chain_sum eval.every=5 --trials 20 \\
        --over train.learning_rate=log:1e-6..1e-4 \\
        --over algorithm.group_size=choice:4,8,16

      reinforge sweep recipe:chain_sum --space sweep.yaml --pruner asha
    """
    _check_machine()
    settings: dict[str, Any] = {
        "trials": trials,
        "metric": metric,
        "direction": direction and direction.value,
        "sampler": sampler and sampler.value,
        "pruner": pruner and pruner.value,
        "seed": seed,
    }
    wanted = read_sweep(space, over or [], settings)
    plan, warnings = plan_sweep(
        config, overrides or [], wanted, folder=dir, keep="all" if keep == "all" else "best"
    )
    warn(warnings)
    _run(plan)


def _check_machine() -> None:
    if importlib.util.find_spec("optuna") is None:
        raise InputError(
            "a sweep needs Optuna, which is not installed.",
            where="sweep",
            fix="pip install 'reinforge[sweep]'",
        )
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise InputError(
            "a sweep starts the processes of its trials itself.",
            where="sweep",
            fix="Start it without torchrun; train.backend=fsdp train.ranks=N starts N ranks.",
        )


def _run(plan: SweepPlan) -> None:
    from reinforge.sweeps.run import run_sweep

    count = plan.sweep.how_many()
    print_text(f"{count} trials in {plan.dir}, to {plan.direction} {plan.metric}")
    result = run_sweep(plan, print_text)
    better = -1 if plan.direction == "maximize" else 1
    order = {"finished": 0, "pruned": 1, "failed": 2, "running": 3}
    ranked = sorted(
        result.trials, key=lambda r: (order[r.state], better * (r.value or 0.0), r.number)
    )
    print()
    print_table(
        [
            {
                "trial": record.number + 1,
                "state": record.state,
                plan.metric: record.value,
                "steps": record.steps,
                "seconds": record.seconds,
                **record.values,
            }
            for record in ranked
        ]
    )
    print()
    best = plan.trial_dir(result.best.number)
    print_mapping(
        {
            "best": best_in_words(result, plan.metric),
            "run": best,
            "summary": result.summary,
        }
    )
    # one line, however long: a terminal breaks it, and copies it whole
    print(f"\nThis trains with its values:\n{plan.command(result.best.values)}")


def best_in_words(result: SweepResult, metric: str) -> str:
    """The best trial, or that there is none: several came to the same, and the first is taken."""
    reached = f"{metric} {result.best.value:.4g}"
    ties = [str(record.number + 1) for record in result.ties]
    if not ties:
        return f"trial {result.best.number + 1}, {reached}"
    numbers = ", ".join(ties[:-1])
    named = f"trials {numbers} and {ties[-1]}" if numbers else f"trial {ties[-1]}"
    return f"trial {result.best.number + 1}, {reached}; {named} came to the same"
