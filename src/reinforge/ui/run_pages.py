"""What the pages about one run show: its line in the list, its state, curves and phases."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import yaml

from reinforge.ui import answers
from reinforge.ui.event_lines import event_lines
from reinforge.ui.run_record import RunRecord
from reinforge.ui.texts import sound
from reinforge.watch.curve_guide import QUESTIONS, note_of, rank_of
from reinforge.watch.doctor.learning import is_learning
from reinforge.watch.doctor.trouble import Trouble
from reinforge.watch.logs import flatten, read_json
from reinforge.watch.past import configs_backwards
from reinforge.watch.report import phase_bars, tiles
from reinforge.watch.runs import headline

SPARK = 60  # points
EVENTS = 500
IDLE = re.compile(r"efficiency/idle_(\w+)")
RECENT = 20
COMMAND = re.compile(r"`reinforge [^`]*`")
SPAN = "from the first to the last step"
MINUTE = 60.0


def run_line(record: RunRecord) -> answers.RunLine:
    """The line of a run in the list."""
    return answers.RunLine.model_validate(_line(record, record.describe()))


def _line(record: RunRecord, run: Mapping[str, Any]) -> dict[str, Any]:
    line = headline(record.path, run, record.config)
    step, steps = line["step"], line["steps"]
    metric = record.main_metric()
    points = record.columns.points(metric, SPARK) if metric else []
    return {
        "run": record.name,
        "state": run["status"],
        "why": run["why"],
        "step": step,
        "steps": steps,
        "share": min(1.0, step / steps) if steps else None,
        "eta_seconds": record.eta_seconds(),
        **{name: line[name] for name in ("algorithm", "model", "reward", "best_eval")},
        "troubles": run["troubles"],
        "causes": [
            {"what": trouble.what, "fix": _fix(trouble, record), "knob": _knob(trouble)}
            for trouble in record.troubles()
            if trouble.is_cause
        ],
        "tags": record.tags(),
        "updated": record.told_at() or line["updated"],
        "spark": [[point[0], point[2]] for point in points],
        "spark_name": metric,
    }


def fits(line: answers.RunLine, search: str, state: str, tag: str) -> bool:
    """Whether a line of the list is asked for."""
    parts = (line.run, line.algorithm, line.model, *line.tags, line.state)
    told = " ".join(part for part in parts if part).lower()
    return (
        all(word in told for word in search.lower().split())
        and (not state or line.state == state)
        and (not tag or tag in line.tags)
    )


def run_page(record: RunRecord, *, launched: bool) -> answers.RunPage:
    with record.lock:
        run = record.describe()
        learning = is_learning(record.doctor.history, ended=run["status"] != "running")
        times = record.columns.times
        ends = [{"time": t} for t in (*times[:1], *times[-1:])] if len(times) > 1 else []
        return answers.RunPage.model_validate(
            {
                **_line(record, run),
                "tiles": [
                    *([label, said] for label, said in tiles(run, ends) if label != SPAN),
                    *([[SPAN, _span(times[-1] - times[0])]] if ends else []),
                ],
                "findings": [_finding(trouble, record) for trouble in record.troubles()],
                "learning": {"answer": learning.answer, "reasons": list(learning.reasons)},
                "notes": run["notes"],
                "events": sound(event_lines(record.events)[-EVENTS:]),
                "checkpoints": [
                    {**c, "path": record.name_of_inside(c["path"])} for c in run["checkpoints"]
                ],
                "settings": run["config"],
                "lineage": run.get("branch_of", []),
                "versions": {k: str(v) for k, v in run["versions"].items()},
                "uncontained": run.get("uncontained", []),
                "launched": launched,
            }
        )


def _span(seconds: float) -> str:
    """
    >>> _span(2.43), _span(150.0)
    ('2.4 s', '2.5 min')
    """
    return f"{seconds:.1f} s" if seconds < MINUTE else f"{seconds / MINUTE:.1f} min"


def _knob(trouble: Trouble) -> dict[str, Any] | None:
    knob = trouble.knob
    return None if knob is None else {"key": knob.key, "value": knob.value, "was": knob.was}


def _fix(trouble: Trouble, record: RunRecord) -> str:
    """What to do, with this run in the commands."""
    place = shlex.quote(str(record.path))
    return COMMAND.sub(lambda found: found[0].replace("RUN", place), trouble.fix)


def _finding(trouble: Trouble, record: RunRecord) -> dict[str, Any]:
    return {
        "kind": trouble.kind,
        "what": trouble.what,
        "fix": _fix(trouble, record),
        "evidence": list(trouble.evidence),
        "since": trouble.since,
        "action": trouble.action,
        "because": trouble.because,
        "knob": _knob(trouble),
        "link": trouble.link,
    }


def curves_page(record: RunRecord, names: Sequence[str], points: int) -> answers.CurvesPage:
    """Curves by the question that they answer; with `names` only those."""
    with record.lock:
        columns = record.columns
        shown = [name for name in columns.names() if not names or name in names]
        by_question: dict[str, list[dict[str, Any]]] = {title: [] for title in QUESTIONS}
        for name in sorted(shown, key=lambda name: (rank_of(name), name)):
            note = note_of(name)
            by_question[note.question].append(
                {
                    "name": name,
                    "title": note.title or name,
                    "says": note.says,
                    "healthy": None if note.healthy is None else list(note.healthy),
                    "evaluation": name.startswith("eval/"),
                    "points": columns.points(name, points),
                }
            )
        return answers.CurvesPage.model_validate(
            {"questions": [{"title": t, "curves": c} for t, c in by_question.items() if c]}
        )


def phases_page(record: RunRecord) -> answers.PhasesPage:
    with record.lock:
        columns = record.columns
        bars = phase_bars(columns)
        idle = {}
        for name, column in columns.columns.items():
            if match := IDLE.fullmatch(name):
                recent = [v for v in column.values[-RECENT:] if v == v]
                if recent:
                    idle[match[1]] = sum(recent) / len(recent)
        memory = "memory/peak_gib"
        points = columns.points(memory, 200) if memory in columns.columns else []
        return answers.PhasesPage.model_validate(
            {**bars, "idle": idle, "memory": [[p[0], p[2]] for p in points]}
        )


def config_page(record: RunRecord) -> answers.ConfigPage:
    """The configuration, and how it changed where the run was continued with other settings."""
    config = read_json(record.path / "config.json")
    parts = list(configs_backwards(record.path))
    changed = []
    for (after, newer), (_, older) in pairwise(parts):
        new, old = flatten(newer), flatten(older)
        keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
        changed.append(
            {"after": after, "changed": [[key, old.get(key), new.get(key)] for key in keys]}
        )
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
    return answers.ConfigPage.model_validate(
        {"yaml": text, "flat": flatten(config), "changed": changed}
    )
