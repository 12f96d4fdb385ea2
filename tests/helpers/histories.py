"""Histories of real runs: `benchmarks/doctor.py --record` wrote them to tests/data/doctor.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from reinforge.watch.doctor.doctor import Doctor

FILE = Path(__file__).resolve().parents[1] / "data" / "doctor.json"


@cache
def histories() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(FILE.read_text())
    return found


def metric_lines(record: dict[str, Any], until: int | None = None) -> Iterator[dict[str, Any]]:
    """Lines of metrics as the run wrote them, in their order; `until` a step."""
    evaluations: dict[int, dict[str, Any]] = {}
    for name, scores in record["scores"].items():
        for step, value, low, high in scores:
            line = evaluations.setdefault(step, {})
            line[name] = value
            if low is not None:
                line |= {f"{name}_low": low, f"{name}_high": high}
    if 0 in evaluations:
        yield {"step": 0, **evaluations.pop(0)}
    for i, step in enumerate(record["steps"]):
        if until is not None and step > until:
            return
        found = {
            name: column[i] if isinstance(column, list) else column
            for name, column in record["columns"].items()
        }
        yield {"step": step, **{name: value for name, value in found.items() if value is not None}}
        if step in evaluations:
            yield {"step": step, **evaluations.pop(step)}


def doctor_of(record: dict[str, Any], until: int | None = None) -> Doctor:
    """A doctor that has seen the run, up to the step `until`."""
    doctor = Doctor(record["config"])
    for line in metric_lines(record, until):
        doctor.observe(line["step"], line)
    return doctor
