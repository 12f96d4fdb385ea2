"""`reinforge runs`: what is in run directories. Reads files only."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from reinforge.cli.arguments import RunDir
from reinforge.cli.lazy import CommandEntry, LazyGroup
from reinforge.cli.show import print_mapping, print_table, print_text, text_of
from reinforge.cli.why import print_group, print_overview, print_sample
from reinforge.core.errors import InputError
from reinforge.core.visible import visible
from reinforge.watch.ending import describe_end, grouped
from reinforge.watch.pipeline import RECORD, show_pipeline, write_pipeline_report
from reinforge.watch.report import write_report
from reinforge.watch.runs import list_runs, newest_samples, show_run
from reinforge.watch.why import explain_group, find_group, find_sample, overview, read_step


class RunsCommands(LazyGroup):
    """`reinforge runs`: those below, and some that read checkpoints or train."""

    entries = {
        "digest": CommandEntry(
            "reinforge.cli.digest:digest",
            "Print one hash of all that a run's newest checkpoint holds.",
        ),
        "diagnose": CommandEntry(
            "reinforge.cli.diagnose:diagnose",
            "Say what is wrong with a run: the first cause, its evidence, the knob to turn.",
        ),
        "compare": CommandEntry(
            "reinforge.cli.compare:compare",
            "Compare runs: where they part and why, which settings differ, how their metrics end.",
        ),
        "replay": CommandEntry(
            "reinforge.cli.replay:replay_command",
            "Do a step of a run again, on a CPU bit for bit, and compare it with what the run"
            " recorded.",
        ),
        "mismatch": CommandEntry(
            "reinforge.cli.mismatch:mismatch",
            "Say why engine and trainer disagree on the probabilities of sampled tokens.",
        ),
        "branch": CommandEntry(
            "reinforge.cli.replay:branch_command",
            "Go on from a step of a run in a new directory, with other settings if wanted.",
        ),
    }


app = typer.Typer(
    cls=RunsCommands,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Show, compare, diagnose and replay runs.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

# characters that `show` prints: of a prompt's end, of a completion's beginning and of its end
PROMPT, COMPLETION, ENDING = 160, 240, 120

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str))


def _best(best: dict[str, Any] | None) -> str | None:
    """
    >>> _best({"metric": "eval/accuracy", "value": 0.5625, "step": 5, "low": None, "high": None})
    'accuracy 0.5625'
    """
    return None if best is None else f"{best['metric'].removeprefix('eval/')} {best['value']:.4g}"


@app.command("list")
def list_command(
    root: Annotated[Path, typer.Argument(help="Where to look for run directories.")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List the runs under a directory.

    [bold]Examples[/bold]

      reinforge runs list

      reinforge runs list experiments --json
    """
    found = list_runs(root)
    if as_json:
        _json(found)
    else:
        print_table([_listed(run) for run in found], empty=f"no runs under {root}")


def _listed(run: Mapping[str, Any]) -> dict[str, Any]:
    """One line of the list, for people."""
    troubles = len(run["troubles"])
    reward = None if run["reward"] is None else f"reward {run['reward']:.4g}"
    return {
        "run": run["dir"],
        "status": (
            f"{run['status']}, {troubles} {'trouble' if troubles == 1 else 'troubles'}"
            if troubles
            else run["status"]
        ),
        "step": f"{run['step']}/{run['steps'] or '?'}",
        "algorithm": run["algorithm"],
        "best": _best(run["best_eval"]) or reward,
        "updated": time.strftime("%Y-%m-%d %H:%M", time.localtime(run["updated"])),
    }


@app.command()
def show(
    run: RunDir,
    samples: Annotated[
        int, typer.Option(min=0, metavar="N", help="How many of the newest samples; 0 = none.")
    ] = 2,
    as_json: AsJson = False,
) -> None:
    """Show one run: its state, its last metrics, how to continue it, what it answered last.

    [bold]Examples[/bold]

      reinforge runs show runs/chain-sum

      reinforge runs show runs/chain-sum --samples 8
    """
    if (run / RECORD).is_file():
        stages = show_pipeline(run)
        _json(stages) if as_json else print_table(stages)
        return
    found = show_run(run)
    newest = newest_samples(run, samples) if samples else []
    if as_json:
        _json({**found, "samples": newest})
        return
    print_text(describe_end(run))
    print()
    print_mapping(_shown(found))
    for sample in newest:
        print()
        print_mapping(_sample(sample))


@app.command()
def report(run: RunDir) -> None:
    """Write report.html for any run: one that has finished, failed, was killed, or is still going.

    Prints its path.

    One file that opens anywhere without network: curves, samples, settings,
    where the time went, what speaks against the run.

    [bold]Example[/bold]

      reinforge runs report runs/chain-sum
    """
    if (run / RECORD).is_file():
        print(write_pipeline_report(run))
        return
    found = show_run(run)
    print(write_report(run))
    far = f"{found['status']}, step {found['step']} of {found['steps'] or '?'}"
    for line in (far, *(f"warning: {trouble}" for trouble in found["troubles"])):
        print(line, file=sys.stderr)


@app.command()
def why(
    run: RunDir,
    step: Annotated[
        int | None,
        typer.Option(help="The step to look at; without it the last one that was recorded."),
    ] = None,
    group: Annotated[
        str | None, typer.Option(help="One of its groups: number, name, or id of the row.")
    ] = None,
    sample: Annotated[
        str | None, typer.Option(help="One sample of the group: number, or uid.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show how rewards became advantages became loss in a step.

    Without --group: one line per group, those with a wrong advantage first. Rewards, advantages,
    ratios and losses are those that were trained with; means, spreads and the check are computed
    from them again. run.log.samples_every says which steps are recorded.

    [bold]Examples[/bold]

      reinforge runs why runs/chain-sum --step 11

      reinforge runs why runs/chain-sum --step 11 --group 0
    """
    if sample is not None and group is None:
        raise InputError("--sample is one of a group.", where="--group", fix="Say which group.")
    record = read_step(run, step)
    if group is None:
        told = {name: value for name, value in record.items() if name != "groups"}
        _json({**told, "groups": overview(record)}) if as_json else print_overview(record)
        return
    one = find_group(record, group)
    if sample is not None:
        found = find_sample(one, sample)
        _json(found) if as_json else print_sample(record, found)
        return
    _json(explain_group(record, one)) if as_json else print_group(record, one)


def _sample(sample: Mapping[str, Any]) -> dict[str, Any]:
    """One sample for people: the end of its prompt, and its completion without the middle of a long
    one.
    """
    reward = sample.get("reward")
    components = sample.get("components") or {}
    told = "unscored" if reward is None else text_of(reward)
    if len(components) > 1:
        told += f" ({text_of(components)})"
    prompt = str(sample.get("prompt", ""))
    completion = str(sample.get("completion", ""))
    if len(prompt) > PROMPT:
        prompt = f"… {prompt[-PROMPT:].lstrip()}"
    if len(completion) > COMPLETION + ENDING:
        completion = f"{completion[:COMPLETION].rstrip()} … {completion[-ENDING:].lstrip()}"
    kind = " (evaluation)" if sample.get("eval") else ""
    return {
        "sample": f"step {sample.get('step')}{kind}, {sample.get('length')} tokens",
        "prompt": visible(prompt),
        "completion": visible(completion),
        "reward": told,
    }


def _shown(run: Mapping[str, Any]) -> dict[str, Any]:
    """The rest of what `runs show` prints: the settings that matter, the last metrics by group,
    what there is and happened. --json has all.
    """
    return {
        "settings": run["config"],
        **grouped(run["last"]),
        "branch of": run.get("branch_of"),
        "checkpoints": [c["step"] for c in run["checkpoints"]] or None,
        "events": [str(event.get("kind")) for event in run["events"]] or None,
        "versions": run["versions"],
    }
