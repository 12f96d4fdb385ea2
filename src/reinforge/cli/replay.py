"""The commands `runs replay` and `runs branch`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reinforge.build.run import train_config
from reinforge.cli.arguments import Overrides, RunDir
from reinforge.cli.counterfactual import print_counterfactual
from reinforge.cli.progress import progress_bar
from reinforge.cli.show import print_mapping
from reinforge.core.errors import InputError
from reinforge.loops.config_changes import allowed, said_of
from reinforge.watch.ending import duration

if TYPE_CHECKING:
    from reinforge.build.replay import ReplayPlan, ReplayResult

Step = Annotated[int, typer.Option("--step", metavar="N", help="Which step, from 1.", min=1)]


def replay_command(
    run: RunDir,
    more: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]", help="Further changes, after --change."),
    ] = None,
    *,
    step: Step,
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--change",
            metavar="KEY=VALUE",
            help="Show how the step would have been with this setting, on the same answers.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Do a step of a run again, on a CPU bit for bit, and compare it with what the run recorded.

    It goes forward from the nearest checkpoint before the step, or from the model itself. The
    directory of the run is only read. Exit code 1 where something came out differently.

    With --change the step is done twice from the same state and on the same answers, as it was
    and with other settings: rewards, advantages, gradient norms, how alike the two updates are,
    the tokens that they move differently.

    [bold]Examples[/bold]

      reinforge runs replay runs/chain-sum --step 12

      reinforge runs replay runs/chain-sum --step 12 --change algorithm.name=dr_grpo

      reinforge runs replay runs/a --step 12 --change rewards.0.weight=2 algorithm.clip.high=0.1
    """
    from reinforge.build.counterfactual import counterfactual
    from reinforge.build.replay import plan_replay, replay

    changes = [*(change or []), *(more or [])]
    if more and not change:
        raise InputError(f"{more[0]}: what is it for?", where="KEY=VALUE", fix="Write --change.")
    plan = plan_replay(run, step)
    tell_cost(plan)
    if changes:
        with steps_bar(plan) as progress:
            other = counterfactual(plan, changes, progress=progress)
        if as_json:
            print(json.dumps(asdict(other), indent=2))
        else:
            print_counterfactual(other)
        return
    with steps_bar(plan) as progress:
        found = replay(plan, progress=progress)
    if as_json:
        print(json.dumps(_as_json(plan, found), indent=2))
    else:
        print_mapping(_told(plan, found))
    if found.equal is False:
        raise typer.Exit(1)


def branch_command(
    run: RunDir,
    new: Annotated[Path, typer.Argument(metavar="NEW", help="The directory of the branch.")],
    overrides: Overrides = None,
    *,
    step: Step,
    train: Annotated[
        bool, typer.Option("--train/--no-train", help="Go on at once, or make the directory only.")
    ] = True,
) -> None:
    """Go on from a step of a run in a new directory, with other settings if wanted.

    The branch has the history of the run up to the step. Settings that the state belongs to
    (model, adapter, critic, data) stay; others may change, and are recorded with where it
    comes from.

    [bold]Examples[/bold]

      reinforge runs branch runs/a runs/b --step 40 train.learning_rate=1e-6

      reinforge runs branch runs/a runs/b --step 40 --no-train
    """
    from reinforge.build.branch import make_branch, plan_branch

    plan = plan_branch(run, step, new, overrides or [])
    for key, (old, now) in plan.changes.items():
        kind = "" if allowed(key, old, now) else ": from here on it is another run"
        print(f"{key} was {said_of(old)} and is {said_of(now)}{kind}", file=sys.stderr)
    if plan.replay is None:
        make_branch(plan)
    else:
        tell_cost(plan.replay)
        with steps_bar(plan.replay) as progress:
            make_branch(plan, progress=progress)
    command = f"reinforge train {new / 'config.json'}"
    print(f"{new} stands at step {step} of {run}; {command} goes on", file=sys.stderr)
    if train:
        train_config(plan.config)


@contextmanager
def steps_bar(plan: ReplayPlan) -> Iterator[Any]:
    with progress_bar() as tell:
        tell("steps", 0, plan.steps)
        yield lambda step: tell("steps", step - plan.begin, plan.steps)


def tell_cost(plan: ReplayPlan) -> None:
    """Before anything is done."""
    origin = "the model itself" if plan.checkpoint is None else plan.checkpoint.name
    took = "" if plan.seconds is None else f", which took {duration(plan.seconds)}"
    lines = [f"from {origin}: {_counted(plan.steps, 'step')} to do{took}"]
    lines += [f"note: {note}" for note in plan.notes]
    print("\n".join(lines), file=sys.stderr)


def _told(plan: ReplayPlan, found: ReplayResult) -> dict[str, Any]:
    recorded = found.recorded or {}
    values: dict[str, Any] = {
        "step": f"{found.step} of {plan.run_dir}",
        "weights now": found.anchor["weights"] or "(in other processes: not compared)",
        "weights then": recorded.get("weights"),
        "gradient now": found.anchor["update"],
        "gradient then": recorded.get("update"),
    }
    if found.state is not None:
        values["checkpoint now"] = found.state[1][:32]
        values["checkpoint then"] = found.state[0][:32]
    if found.asked_again:
        again = _counted(found.asked_again, "answer")
        values["asked again"] = f"{again} of rewards or environments were not in the journal"
    values["compared"] = (
        f"{_counted(found.compared, 'step')}: rows, tokens, log-probs, rewards, gradient norms,"
        " weights"
    )
    values["result"] = {
        True: "equal: bit for bit",
        False: _parted(found),
        None: "nothing was recorded to compare with",
    }[found.equal]
    return values


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _parted(found: ReplayResult) -> str:
    if found.parted is None:
        return "different: the checkpoint of the step has other tensors"
    number, what = found.parted
    return f"different from step {number} on: {what}"


def _as_json(plan: ReplayPlan, found: ReplayResult) -> dict[str, Any]:
    return {
        "run": str(plan.run_dir),
        "step": found.step,
        "from": plan.begin,
        "steps": found.steps,
        "compared": found.compared,
        "equal": found.equal,
        "weights": [(found.recorded or {}).get("weights"), found.anchor["weights"]],
        "update": [(found.recorded or {}).get("update"), found.anchor["update"]],
        "checkpoint": found.state,
        "parted": None
        if found.parted is None
        else {
            "step": found.parted[0],
            "what": found.parted[1].what,
            "group": found.parted[1].group,
            "sample": found.parted[1].sample,
        },
        "asked_again": found.asked_again,
        "notes": plan.notes,
    }
