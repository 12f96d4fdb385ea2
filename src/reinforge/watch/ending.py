"""How a run ended, in a few lines for people, and in summary.json for programs.

Reads a run directory only, so it can be told of any run.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from reinforge.algorithms.catalogue import spec_of
from reinforge.core.this_command import this_command
from reinforge.watch.doctor.history import SCORED
from reinforge.watch.evaluation_news import NOTHING_SCORED, scored_nothing
from reinforge.watch.logs import read_json, read_lines
from reinforge.watch.runs import flatten, show_run

SUMMARY = "summary.json"
REPORT = "report.html"
TRACEBACK = "traceback.txt"  # of a run that failed
UNGROUPED = "run"  # the group of metrics whose names have none
TENTH = 10  # the first and the last tenth of the steps are compared
LARGEST_PHASES = 3
DRAFTED = "efficiency/accepted_length"
MOST_NLL = 700.0  # beyond it a perplexity has no number


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _short(value: float) -> str:
    return f"{value:.4g}"


def _perplexity(nll: float) -> str:
    """
    >>> _perplexity(0.0), _perplexity(1000.0)
    ('1', 'inf')
    """
    return f"{math.exp(nll) if nll < MOST_NLL else math.inf:.4g}"


class SummaryMetric(NamedTuple):
    """A metric that the end of a run tells of, what it is called there, and how it is written."""

    name: str
    label: str
    form: Callable[[float], str] = _short


LOSS = SummaryMetric("train/loss", "loss")
MEAN_REWARD = SummaryMetric("reward/mean", "mean reward")
# what people look at first, by the family of the algorithm; of any other it is the loss
WATCHED = {
    "supervised": (LOSS, SummaryMetric("sft/nll", "perplexity", _perplexity)),
    "preference": (
        SummaryMetric("rewards/accuracy", "reward accuracy", _percent),
        SummaryMetric("rewards/margin", "reward margin"),
        LOSS,
    ),
    "reward": (
        SummaryMetric("reward/accuracy", "accuracy", _percent),
        SummaryMetric("reward/margin", "margin"),
        LOSS,
    ),
}


def grouped(metrics: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """
    >>> grouped({"eval/accuracy": 1.0, "epoch": 2, "policy/ratio/max": 3.0})
    {'eval': {'accuracy': 1.0}, 'policy': {'ratio/max': 3.0}, 'run': {'epoch': 2}}
    """
    found: dict[str, dict[str, Any]] = {}
    for name in sorted(metrics):
        group, slash, rest = name.partition("/")
        found.setdefault(group if slash else UNGROUPED, {})[rest if slash else name] = metrics[name]
    return dict(sorted(found.items()))


def ungrouped(groups: Mapping[str, Any]) -> dict[str, Any]:
    """The reverse of `grouped`.

    Metrics that are not in a group, as summaries once were written, stay as they are.

    >>> ungrouped({"eval": {"accuracy": 1.0}, "run": {"epoch": 2}, "reward/mean": 0.5})
    {'eval/accuracy': 1.0, 'epoch': 2, 'reward/mean': 0.5}
    """
    found: dict[str, Any] = {}
    for group, values in groups.items():
        if isinstance(values, Mapping):
            found |= {
                name if group == UNGROUPED else f"{group}/{name}": value
                for name, value in values.items()
            }
        else:
            found[group] = values
    return found


def duration(seconds: float) -> str:
    """
    >>> duration(3.21), duration(75), duration(7500)
    ('3.2 s', '1 min 15 s', '2 h 5 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    return (
        f"{whole // 60} min {whole % 60} s"
        if whole < 3600
        else f"{whole // 3600} h {whole % 3600 // 60} min"
    )


def describe_end(run_dir: Path) -> str:
    """What was reached, what it cost, where the report is, what to do next; and what speaks against
    it.
    """
    run = show_run(run_dir)
    where = shlex.quote(str(run_dir))
    summary = read_json(run_dir / SUMMARY)
    steps = [line for line in read_lines(run_dir / "metrics.jsonl") if "time/step" in line]
    told = [
        (run["status"], _how_far(run, summary)),
        *(("reached", text) for text in reached(run, steps)),
        ("cost", _cost(steps, summary)),
        ("report", str(run_dir / REPORT) if (run_dir / REPORT).exists() else ""),
        ("trace", str(run_dir / TRACEBACK) if (run_dir / TRACEBACK).exists() else ""),
        ("metrics", f"{SUMMARY} (by group) and metrics.jsonl (every step), in {run_dir}"),
        *(("next", text) for text in next_steps(run_dir, run)),
        ("why", f"{this_command()} runs diagnose {where}" if run["troubles"] else ""),
    ]
    width = max(len(label) for label, _ in told)
    lines = []
    before = None
    for label, text in told:
        if text:
            lines.append(f"{'' if label == before else label:{width}}  {text}")
            before = label
    warnings = [f"warning: {trouble}" for trouble in run["troubles"]]
    notes = [f"note: {trouble}" for trouble in run["notes"]]
    return "\n".join([*warnings, *notes, *lines])


def _how_far(run: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    step = run["step"]
    asked = run["steps"]
    # of a run that was killed since, the summary is that of an earlier ending
    spent = _spent(step, summary) if summary.get("steps") == step else ""
    why = f": {run['why']}" if run["why"] else ""
    if asked is not None and step > asked:
        return f"{step} steps{spent}, more than the {asked} that are asked for{why}"
    return f"{step} of {asked or '?'} steps{spent}{why}"


def _spent(step: int, summary: Mapping[str, Any]) -> str:
    """The time of all steps, and beside it that of this start where it did not do all of them.

    >>> _spent(4, {"seconds": 3.0, "seconds_all_starts": 3.0, "steps_this_start": 4})
    ' in 3.0 s'
    >>> _spent(4, {"seconds": 3.0, "seconds_all_starts": 9.0, "steps_this_start": 1})
    ' in 9.0 s (this start: 1 step in 3.0 s)'
    """
    here = duration(summary["seconds"])
    steps = summary.get("steps_this_start", step)
    if steps == step:
        return f" in {here}"
    total = summary.get("seconds_all_starts")
    everything = "" if total is None else f" in {duration(total)}"
    return f"{everything} (this start: {steps} {'step' if steps == 1 else 'steps'} in {here})"


def reached(run: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """From where to where: the held-out metric, then what people look at in a run of its family."""
    found = []
    family = family_of(run)
    best = run["best_eval"]
    first = run["first_eval"]
    unscored = scored_nothing(run["last"])
    if unscored:
        answers = run["last"].get("eval/unscored", 0)
        found.append(f"eval/accuracy: {NOTHING_SCORED} ({answers:.0f} answers without a reward)")
    if best is not None and not (unscored and best["metric"] == "eval/accuracy"):
        form = _percent if best["metric"] == "eval/accuracy" else _short
        last = run["last"].get(best["metric"], best["value"])
        began = f"{form(first['value'])} -> " if first["step"] != run["last_eval_step"] else ""
        bounds = [run["last"].get(f"{best['metric']}_{end}") for end in ("low", "high")]
        between = (
            "" if None in bounds else f" (95% interval {form(bounds[0])} to {form(bounds[1])})"
        )
        top = (
            "" if best["value"] == last else f"; best {form(best['value'])} at step {best['step']}"
        )
        if family == "supervised" and best["metric"] == "eval/loss":
            between = f" (perplexity {_perplexity(last)})"
        found.append(f"{best['metric']} {began}{form(last)}{between}{top}")
    watched = WATCHED.get(family, (LOSS,))
    if SCORED in run["last"]:  # answers are sampled, and a policy gradient's loss says nothing
        watched = (MEAN_REWARD, *(each for each in watched if each != LOSS))
    for metric in watched:
        found += _from_to(metric, steps)
    return found


def _from_to(metric: SummaryMetric, steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """A metric over the first and over the last tenth of the steps; nothing where it is absent."""
    values = [line[metric.name] for line in steps if isinstance(line.get(metric.name), int | float)]
    if not values:
        return []
    few = max(1, len(values) // TENTH)
    ends = [sum(values[:few]) / few, sum(values[-few:]) / few]
    shown = " -> ".join(metric.form(value) for value in (ends if len(values) > 1 else ends[:1]))
    over = f" (first and last {few} steps)" if few > 1 else ""
    return [f"{metric.label} {shown}{over}"]


def _cost(steps: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> str:
    times: dict[str, float] = {}
    for line in steps:
        for name, value in line.items():
            if name.startswith("time/") and isinstance(value, int | float):
                times[name.removeprefix("time/")] = (
                    times.get(name.removeprefix("time/"), 0.0) + value
                )
    total = times.pop("step", 0.0)
    if not total:
        return ""
    named = [item for item in times.items() if item[0] != "other"]
    largest = sorted(named, key=lambda item: -item[1])[:LARGEST_PHASES]
    told = [(name, seconds) for name, seconds in largest if seconds >= 0.005 * total]
    rest = total - sum(seconds for _, seconds in told)
    if rest >= 0.005 * total:
        told.append(("the rest", rest))
    shares = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in told)
    parts = [f"{duration(total / len(steps))} a step ({shares})"]
    counters = summary.get("counters", {})
    for what in ("sampled", "trained"):
        if tokens := counters.get(f"tokens_{what}"):
            parts.append(f"{tokens:,} tokens {what}")
    if accepted := [line[DRAFTED] for line in steps if DRAFTED in line]:
        parts.append(f"{sum(accepted) / len(accepted):.2f} tokens a step with drafts")
    peak = max((line.get("memory/peak_gib") or 0.0 for line in steps), default=0.0)
    return ", ".join([*parts, *([f"{peak:.3g} GiB of memory at most"] if peak else [])])


def next_steps(run_dir: Path, run: Mapping[str, Any]) -> list[str]:
    """Commands that make sense now."""
    where = shlex.quote(str(run_dir))
    if run["status"] not in ("finished", "running"):
        again = [
            (
                "start it again with the same command: it goes on from its newest checkpoint"
                if run["checkpoints"]
                else ""
            )
        ]
        return [text for text in (*again, f"{this_command()} runs show {where}") if text]
    if not run["checkpoints"] or run["status"] == "running":
        return [f"{this_command()} runs show {where}"]
    merge = " --merge" if flatten(read_json(run_dir / "config.json")).get("adapter.rank") else ""
    export = f"{this_command()} export {where} OUT{merge}"
    return [export] if is_reward_model(run) else [f"{this_command()} chat {where}", export]


def family_of(run: Mapping[str, Any]) -> str:
    """Of the run's algorithm."""
    return spec_of(run["config"].get("algorithm.name", "")).family


def is_reward_model(run: Mapping[str, Any]) -> bool:
    """Whether the run trains scores, not text."""
    return family_of(run) == "reward"


def write_summary(run_dir: Path, values: Mapping[str, Any]) -> None:
    """summary.json: `metrics` is by name, and is written by group."""
    text = json.dumps({**values, "metrics": grouped(values["metrics"])}, indent=1, default=str)
    (run_dir / SUMMARY).write_text(text, encoding="utf-8")
