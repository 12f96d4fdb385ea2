"""What a test needs from the machine: a pytest plugin that says what was skipped and why, and fails
what had to run.

A reason to skip begins with the name of what is missing: `missing("browser", "no chromium on the
PATH")`. REINFORGE_MUST_RUN="browser sandbox" names what this machine must have: a test skipped for
want of it fails.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator
from typing import Any, NoReturn

import pytest

NAMES = ("axe", "browser", "sandbox", "triton")


def because(what: str, why: str) -> str:
    """The reason of a skip for want of `what`."""
    assert what in NAMES, f"{what} is none of {NAMES}"
    return f"{what}: {why}"


def missing(what: str, why: str) -> NoReturn:
    """Skips the test that calls it (or fails it, see above)."""
    pytest.skip(because(what, why), allow_module_level=True)


def unless(there: bool, what: str, why: str) -> pytest.MarkDecorator:
    """A mark: skips where `what` is not there."""
    return pytest.mark.skipif(not there, reason=because(what, why))


def demanded() -> list[str]:
    names = os.environ.get("REINFORGE_MUST_RUN", "").split()
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise pytest.UsageError(f"REINFORGE_MUST_RUN: {unknown[0]} is none of {', '.join(NAMES)}")
    return names


def reason_of(report: Any) -> str:
    """Why a test or a module was skipped."""
    told = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return told.removeprefix("Skipped: ")


def fail_what_must_run(report: Any) -> None:
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = reason_of(report)
    if reason.partition(":")[0] in demanded():
        report.outcome = "failed"
        report.longrepr = f"skipped, and REINFORGE_MUST_RUN says that it must run here: {reason}"


def pytest_configure() -> None:
    demanded()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    report = yield
    fail_what_must_run(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, Any, Any]:
    report = yield
    fail_what_must_run(report)
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Skips by reason, the most frequent first: one line a reason, however many places."""
    reasons = Counter(reason_of(report) for report in terminalreporter.stats.get("skipped", []))
    if reasons:
        terminalreporter.section("skipped, by reason")
    for reason, count in sorted(reasons.items(), key=lambda item: (-item[1], item[0])):
        terminalreporter.write_line(f"{count:5d}  {reason}")
