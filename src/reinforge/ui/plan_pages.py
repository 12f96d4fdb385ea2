"""What is wrong with a configuration that somebody writes in the page, key by key."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from reinforge.config.load import load_config
from reinforge.core.errors import InputError
from reinforge.pipelines.plan import plan
from reinforge.plan.plan import describe
from reinforge.plan.preflight import PlanReport, preflight
from reinforge.ui import answers
from reinforge.ui.work import config_file

WHERE = re.compile(r"([\w.]+)(?: \((line \d+)\))?: (.*)", re.DOTALL)
ITEM = "\n  - "


def plan_page(text: str, run_dir: Path, *, full: bool) -> answers.PlanPage:
    """`full`: with the data and reward checks, which take seconds, in a process of their own."""
    overrides = [f"run.dir={run_dir}"]
    with config_file(text) as file:
        report = plan(file, overrides) if full else _first_phase(file, overrides)
        errors = [error.replace(f"{file}: ", "") for error in report.errors]
    return answers.PlanPage(
        ok=report.ok,
        checked=full,
        problems=[problem_of(one) for error in errors for one in _single(error)],
        warnings=report.warnings,
        says=[f"{label}: {said}" for label, said in describe(report)] if report.ok else [],
        summary=report.summary,
    )


def _first_phase(file: Path, overrides: Sequence[str]) -> PlanReport:
    try:
        return preflight(load_config(file, overrides))
    except InputError as error:
        return PlanReport(errors=[str(error)])


def _single(error: str) -> list[str]:
    """The problems of a message that has several.

    >>> _single("config.yaml: 2 problems:\\n  - a: b\\n  - c: d"), _single("a: b")
    (['a: b', 'c: d'], ['a: b'])
    """
    return error.split(ITEM)[1:] if ITEM in error else [error]


def problem_of(text: str) -> answers.ConfigProblem:
    """
    >>> found = problem_of("train.steps (line 3): must be above 0.")
    >>> found.where, found.what
    ('train.steps', 'line 3: must be above 0.')
    """
    match = WHERE.fullmatch(text)
    if match is None:
        return answers.ConfigProblem(where=None, what=text)
    line = f"{match[2]}: " if match[2] else ""
    return answers.ConfigProblem(where=match[1], what=f"{line}{match[3]}")
