"""Runs commands one after the other, each within its limit: for a machine that is rented by the
minute, where a command that hangs, or a pipe that swallows what was printed, costs the others.

    python tools/run_list.py LIST --out FOLDER [--seconds 570]

A line of LIST is NAME LIMIT COMMAND, the limit in seconds; lines with # in front are left out:

    wide   120  python benchmarks/gpu_generate.py --shape 0.5b --workloads wide
    tests   90  python -m pytest -q -n 6 tests/gpu/test_exact_cuda.py

What a command prints goes to FOLDER/NAME.log as it comes. At its limit the command and all that it
started are killed. --seconds is for all of them: what could not begin in time is said, and a limit
is cut to what is left. After each command one line is printed: its name, exit code (`late` where
the limit ended it), seconds, and the last line of what it said.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

LEAST = 5.0  # seconds for which it is worth to begin
SHOWN = 400  # characters of a last line


@dataclass(frozen=True)
class Command:
    """One line of the list."""

    name: str
    limit: float
    words: str


def read_list(text: str) -> list[Command]:
    """The commands of a list; a line that is none is an error that names it."""
    found: list[Command] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        parts = line.split(None, 2)
        if len(parts) < 3 or not parts[1].replace(".", "", 1).isdigit():
            raise SystemExit(f"line {number} is not NAME LIMIT COMMAND: {line}")
        if any(parts[0] == command.name for command in found):
            raise SystemExit(f"line {number}: there is a {parts[0]} already")
        found.append(Command(parts[0], float(parts[1]), parts[2]))
    return found


def run(command: Command, limit: float, log: Path) -> str:
    """Its exit code, or `late`. Nothing that it started is left."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            ["bash", "-c", command.words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        try:
            return str(process.wait(limit))
        except subprocess.TimeoutExpired:
            return "late"
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()


def last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][-SHOWN:] if lines else ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("list", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=570.0)
    args = parser.parse_args()
    commands = read_list(args.list.read_text())
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.seconds
    failed = False
    for command in commands:
        left = end - time.monotonic()
        if left < LEAST:
            print(f"{command.name}: not begun", flush=True)
            failed = True
            continue
        start = time.monotonic()
        log = args.out / f"{command.name}.log"
        code = run(command, min(command.limit, left), log)
        failed |= code != "0"
        seconds = time.monotonic() - start
        print(f"{command.name}: {code}, {seconds:.0f} s: {last_line(log)}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
