"""benchmarks/first_line.py: what it measures of a process."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import first_line
import pytest

WORK = (
    "import sys, time",
    "while time.process_time() < 0.5: pass",
    "print(flush=True)",
    "sys.stdin.read()",
)


def test_the_time_of_a_process_has_that_of_its_children() -> None:
    """Half a second of work in a child, while the parent waits."""
    work = "\n".join(WORK)
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {work!r}])"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdin is not None
    process.stdout.readline()
    found = first_line.cpu_seconds(process.pid)
    process.stdin.close()
    process.wait()
    assert 0.45 < found < 2.0
    assert first_line.cpu_seconds(process.pid) == 0.0  # it is gone


def test_own_time_is_that_of_the_clock() -> None:
    before = time.process_time()
    assert first_line.cpu_seconds(os.getpid()) >= before - 0.02


def test_the_medians_are_told() -> None:
    rounds = [
        {"first_line_seconds": a, "first_step_seconds": b, "first_step_cpu_seconds": b}
        for a, b in ((0.1, 9.0), (0.3, 8.0), (0.2, 20.0))
    ]
    found = first_line.summary(rounds)
    assert found["first_line_seconds"] == pytest.approx(0.2)
    assert found["first_step_cpu_seconds"] == pytest.approx(9.0)
