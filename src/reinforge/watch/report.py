"""One HTML file about a run that opens anywhere, without network: curves, evaluations, samples,
settings, timings, events.

Everything that a model or a data set wrote is text here: escaped in the page, `<` and `&` escaped
inside the embedded JSON, and a content policy that runs no script but ours (by its hash).
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from reinforge.core.html import escape
from reinforge.watch.columns import MetricColumns, Point, number
from reinforge.watch.curve_guide import note_of
from reinforge.watch.doctor.doctor import diagnosed
from reinforge.watch.doctor.history import SCORED
from reinforge.watch.evaluation_news import NOTHING_SCORED, scored_nothing
from reinforge.watch.runs import flatten, read_json, read_lines, show_run
from reinforge.watch.transcripts import transcript_table
from reinforge.watch.troubles import banner, fault_table, trouble_banner

FIRST = (
    "eval/accuracy",
    "eval/loss",
    "reward/mean",
    "train/loss",
    "response/length",
    "policy/entropy",
    "policy/kl",
    "train/grad_norm",
    "groups/zero_variance",
)
MOST_FIRST = 6
LOSS = "train/loss"
POINTS = 1000  # per curve; longer runs are averaged over bins
BARS = 60
SAMPLES = 300
TEXT = 4000
SECTIONS = (
    ("Reward", r"reward/"),
    ("Evaluation", r"eval/"),
    ("Response", r"response/"),
    ("Policy", r"(policy|mismatch|groups)/"),
    ("Training", r"train/(?!router_)"),
    ("Experts", r"(experts/|train/router_)"),
    ("Faults", r"(faults|sandbox)/"),
    ("Throughput", r"(tokens|tokens_per_second|efficiency|memory)\b"),
    ("Other", r""),
)


def write_report(run_dir: Path) -> Path:
    """Writes report.html into the run directory and returns its path."""
    run_dir = Path(run_dir)
    run = show_run(run_dir)
    lines = list(read_lines(run_dir / "metrics.jsonl"))
    series = {name: points for name, points in curves(lines).items() if points}
    events = list(read_lines(run_dir / "events.jsonl"))
    recorded = list(read_lines(run_dir / "samples.jsonl"))
    samples = [s for s in recorded if not s.get("eval")][-SAMPLES:]
    page = own_file("report.html")
    script = own_file("report.js")
    summary = read_json(run_dir / "summary.json")
    config = run["config"]
    parts = {
        "DRAWING": own_file("report.css"),
        "SCRIPT": script,
        "HASH": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "TITLE": escape(run_dir.resolve().name),
        "SUBTITLE": escape(
            " · ".join(
                str(v) for v in (config.get("algorithm.name"), config.get("model.path")) if v
            )
        ),
        "STATUS": status_line(run),
        "TILES": "".join(
            f"<div class=tile><b>{escape(value)}</b><span>{escape(label)}</span></div>"
            for label, value in tiles(run, lines)
        ),
        "SAMPLE_STEPS": "".join(
            f"<option>{escape(step)}</option>"
            for step in dict.fromkeys(s.get("step") for s in samples)
        ),
        "SAMPLES": (
            "".join(map(sample_row, samples))
            or "<tr><td colspan=7 class=soft>The run recorded no samples.</td></tr>"
        ),
        "TRANSCRIPTS": transcript_table(recorded),
        "CONFIG": key_rows(flatten(read_json(run_dir / "config.json"))),
        "VERSIONS": key_rows(run["versions"]),
        "SUMMARY": folded("Summary", key_rows(flatten(summary))) if summary else "",
        "PREDICTION": prediction_table(
            compare_prediction(read_json(run_dir / "prediction.json"), lines)
        ),
        "BANNER": (
            banner(run.get("uncontained", [])) + trouble_banner(diagnosed(run_dir, run["status"]))
        ),
        "SETTINGS": key_rows(config),
        "FAULTS": fault_table(events),
        "EVENTS": "".join(event_row(e) for e in events if e.get("kind") != "fault"),
        "DATA": embed(
            {
                "series": series,
                "first": first_curves(series),
                "sections": sections(series),
                "says": {name: says for name in series if (says := note_of(name).says)},
                "phases": phases(lines),
            }
        ),
    }
    # one pass: what is put in is not searched again
    page = re.sub(r"@@([A-Z_]+)@@", lambda match: parts[match[1]], page)
    target = run_dir / "report.html"
    part = run_dir / ".report.html.part"
    part.write_text(page, encoding="utf-8")
    os.replace(part, target)
    return target


def own_file(name: str) -> str:
    """A file of this package. report.js and report.css are built from ui/src (`make ui`): the web
    app draws with the same code.
    """
    return Path(__file__).with_name(name).read_text(encoding="utf-8").strip()


def status_line(run: Mapping[str, Any]) -> str:
    """HTML: how the run stands, how far it is, and of one that has not finished, when this was
    written or why it ended.
    """
    how = run["status"]
    far = f"step {run['step']} of {run['steps'] or '?'}"
    more = (
        f"as of {time.strftime('%Y-%m-%d %H:%M:%S %Z')}"
        if how in ("running", "interrupted")
        else run["why"] or ""
    )
    return (
        f'<span class="badge {escape(how)}">{escape(how)}</span>'
        f" {escape(', '.join(part for part in (far, more) if part))}"
    )


def folded(title: str, rows: str) -> str:
    """A table that is opened by a click."""
    return (
        f"<details><summary>{escape(title)}</summary><div"
        f" class=panel><table><tbody>{rows}</tbody></table></div></details>"
    )


def embed(value: Any) -> str:
    """JSON that cannot leave its script element: ASCII, without <, > and &."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def curves(lines: Iterable[Mapping[str, Any]]) -> dict[str, list[Point]]:
    """Points of every metric."""
    columns = MetricColumns(lines)
    return {name: columns.points(name, POINTS) for name in columns.names()}


def sections(series: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Metric names by heading; each appears once, under the first heading that fits."""
    left = [name for name in series if name not in first_curves(series)]
    found = []
    for title, pattern in SECTIONS:
        names = [name for name in left if re.match(pattern, name)]
        left = [name for name in left if name not in names]
        if names:
            found.append(
                (title, sorted(names, key=lambda name: (not name.endswith("/mean"), name)))
            )
    return found


def first_curves(series: Mapping[str, Any]) -> list[str]:
    """The curves that are looked at first. They are drawn before the others, and only once."""
    hidden = LOSS if SCORED in series else None  # of a policy gradient it says nothing
    return [name for name in FIRST if name in series and name != hidden][:MOST_FIRST]


def phases(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """`phase_bars` of lines of metrics."""
    timed = [line for line in lines if any(key.startswith("time/") for key in line)]
    return phase_bars(MetricColumns({"time": 0.0, **line} for line in timed))


def phase_bars(columns: MetricColumns) -> dict[str, Any]:
    """Seconds per step by phase, averaged over at most BARS bins: bars are [first step, last step,
    seconds of each phase].
    """
    timed = {
        key.removeprefix("time/"): column
        for key, column in columns.columns.items()
        if key.startswith("time/")
    }
    lines = sorted({line for column in timed.values() for line in column.lines})
    timed.pop("step", None)  # that is their sum
    size = max(-(-len(lines) // BARS), 1)
    bars = []
    for i in range(0, len(lines), size):
        chunk = lines[i : i + size]
        means = [column.total(chunk[0], chunk[-1]) / len(chunk) for column in timed.values()]
        ends = [int(columns.steps[line]) for line in (chunk[0], chunk[-1])]
        bars.append([*ends, *(round(mean, 5) for mean in means)])
    return {"names": list(timed), "bars": bars}


def compare_prediction(
    prediction: Mapping[str, Any], lines: Iterable[Mapping[str, Any]]
) -> list[tuple[str, str, float, float | None]]:
    """(what, unit, predicted, measured) of memory and of each phase's seconds.

    Measured: the highest peak, the median step.
    """
    lines = list(lines)

    def values(name: str) -> list[float]:
        return [value for line in lines if (value := number(line.get(name))) is not None]

    peaks = {phase: parts["peak"] for phase, parts in prediction.get("memory_gib", {}).items()}
    # a CPU has one number for the whole process
    if peaks and not any(values(f"memory/{phase}_gib") for phase in peaks):
        peaks = {"peak": max(peaks.values())}
    found = [
        (f"memory, {phase}", "GiB", peak, max(values(f"memory/{phase}_gib"), default=None))
        for phase, peak in peaks.items()
    ]
    for phase, seconds in prediction.get("seconds", {}).items():
        times = sorted(values(f"time/{phase}"))
        found.append(
            (f"{phase}, one step", "s", seconds, times[len(times) // 2] if times else None)
        )
    return found


def prediction_table(rows: Sequence[tuple[str, str, float, float | None]]) -> str:
    """Predicted beside measured. Nothing where nothing was predicted."""
    if not rows:
        return ""

    def ratio(measured: float | None, predicted: float) -> str:
        return f"{measured / predicted:.2f}" if measured is not None and predicted else ""

    body = "".join(
        f"<tr><td class=key>{escape(what)}</td><td class=number>{predicted:.3g} {unit}</td>"
        f"<td class=number>{'' if measured is None else f'{measured:.3g} {unit}'}</td>"
        f"<td class=number>{ratio(measured, predicted)}</td></tr>"
        for what, unit, predicted, measured in rows
    )
    head = "<thead><tr><th></th><th>predicted</th><th>measured</th><th>ratio</th></tr></thead>"
    note = "Times are predicted for completions of the full length."
    return (
        f"<h2>Prediction</h2><div class=panel><table>{head}<tbody>{body}</tbody></table></div><div"
        f" class=soft>{note}</div>"
    )


def tiles(run: Mapping[str, Any], lines: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(label, value) of the headline numbers that the run has."""
    last = run["last"]
    best = run["best_eval"]
    found = []
    if scored_nothing(last):
        found.append(("last evaluation", NOTHING_SCORED))
    if best:
        form = "{:.1%}" if best["metric"] == "eval/accuracy" else "{:.4g}"
        known = best["low"] is not None and best["high"] is not None
        between = f" ({form.format(best['low'])} to {form.format(best['high'])})" if known else ""
        found.append(
            (f"best {best['metric']}, step {best['step']}{between}", form.format(best["value"]))
        )
    headline = ("reward/mean", "last mean reward") if SCORED in last else (LOSS, "last loss")
    for name, label in (headline, ("response/length", "last response length")):
        if name in last:
            found.append((label, f"{last[name]:.4g}"))
    if "tokens_per_second" in last:
        found.append(("tokens per second", f"{last['tokens_per_second']:,.0f}"))
    if "efficiency/train_mfu" in last:
        found.append(("training MFU", f"{last['efficiency/train_mfu']:.0%}"))
    times = [t for line in lines if (t := number(line.get("time"))) is not None]
    if len(times) > 1:
        found.append(("from the first to the last step", f"{(times[-1] - times[0]) / 60:.1f} min"))
    return found


def sample_row(sample: Mapping[str, Any]) -> str:
    def text(value: Any) -> str:
        whole = str(value or "")
        return escape(
            whole
            if len(whole) <= TEXT
            else f"{whole[:TEXT]} … ({len(whole) - TEXT} more characters)"
        )

    reward = number(sample.get("reward"))
    components = sample.get("components")
    shown = (
        ", ".join(
            f"{k} {v:.3g}" if isinstance(v, int | float) else f"{k} {v}"
            for k, v in components.items()
        )
        if isinstance(components, dict)
        else ""
    )
    return (
        f'<tr data-step="{escape(sample.get("step"))}"><td'
        f" class=number>{escape(sample.get('step'))}</td>"
        f"<td class=text><div>{text(sample.get('prompt'))}</div></td><td"
        f" class=text><div>{text(sample.get('completion'))}</div></td>"
        f"<td class=number>{'unscored' if reward is None else f'{reward:.4g}'}</td>"
        f"<td>{escape(shown)}</td><td>{escape(sample.get('stop'))}</td><td"
        f" class=number>{escape(sample.get('length'))}</td></tr>"
    )


def key_rows(values: Mapping[str, Any]) -> str:
    shown = {
        key: value if isinstance(value, str) else json.dumps(value, default=str)
        for key, value in values.items()
    }
    return "".join(
        f"<tr><td class=key>{escape(key)}</td><td class=text>{escape(value)}</td></tr>"
        for key, value in shown.items()
    )


def event_row(event: Mapping[str, Any]) -> str:
    at = number(event.get("time"))
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) if at is not None else ""
    rest = ", ".join(
        f"{k}: {v if isinstance(v, str) else json.dumps(v)}"
        for k, v in event.items()
        if k not in ("time", "kind")
    )
    return (
        f"<tr><td class=key>{when}</td><td>{escape(event.get('kind'))}</td><td"
        f" class=text>{escape(rest)}</td></tr>"
    )
