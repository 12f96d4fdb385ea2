"""The command `runs compare`: runs by their directories, or models by the answers that they gave to
the same problems.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from reinforge.cli.show import print_mapping, print_table
from reinforge.core.errors import InputError
from reinforge.core.visible import visible
from reinforge.evals.paired_comparison import PairedComparison, compare_paired
from reinforge.loops.parting import find_parting
from reinforge.watch.logs import read_lines
from reinforge.watch.runs import compare_runs

ANSWERS = ".jsonl"


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN",
            help="Run directories; or records of answers (benchmarks/MODEL/TASK.jsonl), several"
            " seeds of a model with commas between them.",
        ),
    ],
    replay: Annotated[
        bool,
        typer.Option(
            "--replay",
            help="Do the step at which two runs part again, to find the first token that differs.",
        ),
    ] = False,
    metric: Annotated[
        str | None, typer.Option(help="Of answers: which of their scores; default: the first.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare runs: where they part and why, which settings differ, how their metrics end.

    Of two runs the first step is named at which something differs, and the first thing in it:
    rows, tokens, log-probs, rewards, gradient, weights; with the setting, data, code or machine
    that explains it.

    Of two records of answers to the same problems: a paired comparison, and how many problems a
    difference like this needs.

    [bold]Examples[/bold]

      reinforge runs compare runs/a runs/b

      reinforge runs compare a1/gsm8k.jsonl,a2/gsm8k.jsonl b1/gsm8k.jsonl,b2/gsm8k.jsonl
    """
    if all(name.endswith(ANSWERS) for name in runs):
        _compare_answers(runs, metric, as_json)
        return
    found = compare_runs([Path(run) for run in runs])
    if len(runs) == 2:
        found["parting"] = _parting(Path(runs[0]), Path(runs[1]), replay)
    if as_json:
        print(json.dumps(found, indent=2, default=str))
        return
    parting = found.pop("parting", None)
    if parting is not None:
        print_mapping(_told(parting))
        print()
    _print_tables(found)


def _parting(first: Path, second: Path, replay: bool) -> dict[str, Any]:
    """Where two runs part, as plain values."""
    common, found = find_parting(first, second)
    if found is None:
        return {"compared": common, "step": None}
    told: dict[str, Any] = {
        "compared": common,
        "step": found.step,
        "what": found.what.what,
        "in words": str(found.what),
        "group": found.what.group or None,
        "sample": found.what.sample,
        "cause": found.cause,
        "evidence": found.evidence,
    }
    if found.what.sample is not None:
        from reinforge.build.first_token import first_token

        if replay:
            print(f"doing step {found.step} of both again", file=sys.stderr)
        token = first_token(first, second, found, replayed=replay)
        told["token"] = None if token is None else asdict(token)
    return told


def _told(parting: Mapping[str, Any]) -> dict[str, Any]:
    if not parting["compared"]:
        return {"part at": "unknown: they have no step with an anchor in common"}
    if parting["step"] is None:
        return {"part at": f"nowhere: {parting['compared']} steps are equal, bit for bit"}
    told = {
        "part at": f"step {parting['step']}: {parting['in words']}",
        "why": f"{parting['cause']}: {'; '.join(parting['evidence'])}",
    }
    token = parting.get("token")
    if token is not None:
        ours, theirs = (visible(text, 20) or "(its end)" for text in token["tokens"])
        logprobs = " and ".join("-" if x is None else f"{x:.9g}" for x in token["logprobs"])
        place = f"number {token['position'] + 1} of the answer"
        context = visible(token["context"], 40)
        told["first token"] = (
            f"{place}, after {context!r}: {ours!r} and {theirs!r} (log-probs {logprobs})"
        )
    elif parting["what"] in ("tokens", "logprobs"):
        told["first token"] = "--replay does the step again and finds it"
    return told


def _print_tables(found: Mapping[str, Any]) -> None:
    names = [str(run) for run in found["runs"]]
    single = {
        key: values for key, values in found.items() if key != "runs" and isinstance(values, list)
    }
    print_table(
        [{"": key, **dict(zip(names, values, strict=True))} for key, values in single.items()]
    )
    for title, part in found.items():
        if isinstance(part, Mapping):
            print()
            print_table(
                [
                    {title: key, **dict(zip(names, values, strict=True))}
                    for key, values in part.items()
                ],
                empty=f"{title}: no difference",
            )


# ---- answers to the same problems ----


def _compare_answers(records: Sequence[str], metric: str | None, as_json: bool) -> None:
    if len(records) != 2:
        raise InputError(
            f"{len(records)} records of answers were given.",
            where="RUN",
            fix="Give two; several seeds of one model with commas between them.",
        )
    names = [metric] if metric else []
    first, second = (_scores(record, names) for record in records)
    found = compare_paired(first, second)
    if as_json:
        print(json.dumps({"metric": names[0], **asdict(found)}, indent=2))
    else:
        print_mapping(_described(found, names[0], records))


def _scores(record: str, names: list[str]) -> dict[str, list[float]]:
    """By problem, of all answers in all files. The first score of the first answer is the one that
    is compared, unless `names` has one.
    """
    found: dict[str, list[float]] = {}
    for name in record.split(","):
        path = Path(name)
        if not path.is_file():
            raise InputError(f"there is no {path}.", where="RUN", fix="Check the path.")
        for line in read_lines(path):
            scores = line.get("scores")
            if not isinstance(scores, dict) or "id" not in line:
                raise InputError(
                    f"{path} has lines without id and scores.",
                    where=str(path),
                    fix="Give what `reinforge benchmark` wrote: TASK.jsonl.",
                )
            if not names and scores:
                names.append(next(iter(scores)))
            value = scores.get(names[0]) if names else None
            if isinstance(value, int | float):
                found.setdefault(str(line["id"]), []).append(float(value))
    return found


def _described(found: PairedComparison, metric: str, records: Sequence[str]) -> dict[str, Any]:
    interval = f"{found.low:+.1%} to {found.high:+.1%}"
    if found.told:
        verdict = "the difference is told from 0"
    else:
        verdict = "not told from 0: these problems do not show a difference"
    return {
        "first": f"{found.means[0]:.1%} {metric} ({records[0]}, {found.answers[0]} answers)",
        "second": f"{found.means[1]:.1%} {metric} ({records[1]}, {found.answers[1]} answers)",
        "problems": f"{found.problems} that both have answered"
        + (f", {found.left_out} left out that one has not" if found.left_out else ""),
        "difference": f"{found.difference:+.1%} (95% interval {interval}, paired)",
        "by problem": f"the second is better at {found.better}, worse at {found.worse}, equal at"
        f" {found.problems - found.better - found.worse}",
        "result": verdict,
        "needed": None
        if found.needed is None
        else f"{found.needed} problems for a difference of this size to be seen in 8 of 10 trials",
    }
