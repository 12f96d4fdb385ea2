"""The command `runs mismatch`."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from reinforge.cli.arguments import RunDir
from reinforge.cli.replay import steps_bar, tell_cost
from reinforge.cli.show import print_table, print_text
from reinforge.core.visible import visible

if TYPE_CHECKING:
    from reinforge.build.mismatch import MismatchReport
    from reinforge.build.mismatch_paths import PathComparison
    from reinforge.build.mismatch_words import CauseWords

INDENT = 12  # of what is told of a cause
FAR = 0.1  # of what it is from its own past: so near is the engine to the trainer


def mismatch(
    run: RunDir,
    step: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Which step; without it the one with the largest mismatch.", min=1
        ),
    ] = None,
    samples: Annotated[
        int, typer.Option(metavar="N", help="How many of its samples are looked at.", min=1)
    ] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say why engine and trainer disagree on the probabilities of sampled tokens.

    The step is done again, on the rollouts that the run kept (run.keep_rollouts) or on the same
    ones generated once more. Then its samples are computed in every way that an engine may have
    computed them: in another precision, at another temperature, after another prompt, with older
    weights, through other experts. What gives the engine's numbers is the cause. Exit code 1 where
    they differ by more than rounding.

    [bold]Examples[/bold]

      reinforge runs mismatch runs/chain-sum

      reinforge runs mismatch runs/chain-sum --step 12 --json
    """
    from reinforge.build.mismatch import explain_mismatch, plan_mismatch

    plan = plan_mismatch(run, step)
    tell_cost(plan.replay)
    if not plan.kept:
        print(
            "note: the rollouts are not kept (run.keep_rollouts): they are generated again, by the"
            " engine as it is now.",
            file=sys.stderr,
        )
    with steps_bar(plan.replay) as progress:
        found = explain_mismatch(plan, samples=samples, progress=progress)
    if as_json:
        print(json.dumps({**asdict(found), "differs": found.differs}, indent=2))
    else:
        print_report(found)
    if found.differs:
        raise typer.Exit(1)


def print_report(found: MismatchReport) -> None:
    print_text(_heading(found))
    print()
    if not found.differs:
        print_text(
            "Nothing differs: the engine's log-probs are the trainer's, up to the rounding of"
            f" {found.precision} ({found.limit:.2g} nats)."
        )
        print_text(_worst(found, "largest"))
        return
    if not found.causes:
        print_text("No cause that was tried explains it.")
    for number, cause in enumerate(found.causes):
        _print_cause(found, cause, number)
    if found.causes and found.left > found.limit:
        print()
        print_text(f"{found.left:.3g} nats per token are left, which nothing here explains.")
    if found.paths is not None:
        print()
        print_text(_paths(found.paths))
    if found.tried:
        print()
        print_text(f"Tried, each by itself (of {found.apart:.3g} nats per token):")
        print_table(
            [
                {
                    "cause": tried.name,
                    "if the engine had": visible(tried.guess, 60),
                    "nats left": tried.left,
                    "explained": f"{max(0.0, tried.explained):.1%}",
                }
                for tried in found.tried
            ]
        )
    for note in found.notes:
        print_text(f"note: {note}")


def _heading(found: MismatchReport) -> str:
    looked, every = found.samples
    return (
        f"{found.run}, step {found.step}, engine {found.engine}: engine and trainer are"
        f" {found.overall:.3g} nats apart per token ({looked} of {every} samples looked at,"
        f" {found.tokens} tokens)"
    )


def _print_cause(found: MismatchReport, cause: CauseWords, number: int) -> None:
    print_text(f"{'Cause' if not number else 'And'}: {cause.name}")
    print_text(f"  {cause.what}")
    lines = [f"explains {cause.explained:.1%}: {cause.left:.3g} nats per token are left"]
    lines += cause.evidence
    if not number:
        lines.append(_worst(found, "worst"))
    for i, line in enumerate(lines):
        print_text(("  evidence".ljust(INDENT) if not i else " " * INDENT) + line)
    print_text("  turn".ljust(INDENT) + cause.turn)


def _paths(paths: PathComparison) -> str:
    told = (
        f"The engine as it is now ({paths.samples} samples through its cache): {paths.told:.2g}"
        f" nats from what it told then, {paths.trainer:.2g} from the trainer."
    )
    if paths.trainer < FAR * paths.told:
        return f"{told} What differed then is not in this code and configuration."
    first = paths.first
    if first is None:
        return f"{told} No operation parts from those before it."
    return (
        f"{told} The first operation that differs: {first.operation}, by {first.gap:.2g} of its"
        f" size ({first.before:.1g} before it)."
    )


def _worst(found: MismatchReport, word: str) -> str:
    worst = found.worst
    return (
        f"{word} difference: token {visible(worst.token, 12)!r} after"
        f" {visible(worst.context, 24)!r} in {worst.sample} [{worst.position}]: engine"
        f" {math.exp(worst.engine):.4g}, trainer {math.exp(worst.trainer):.4g}"
    )
