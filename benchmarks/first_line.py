"""How long somebody waits after Enter: for the first line of `reinforge train` on the screen, and
for the first step of GRPO on the model of `reinforge tiny`.

    python benchmarks/first_line.py [--rounds 3] [--out benchmarks/results/first_line.json]

The command runs at a terminal (a pty), as a user starts it; the model is made before. A round is
measured until the first optimizer step is logged, with the evaluation before it: wall seconds, and
CPU seconds of all its processes. Prints the median of the rounds against the limits, 1 s to the
first line and 15 CPU seconds to the first step, and exits with 1 where one is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import pty
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

LIMITS = {"first_line_seconds": 1.0, "first_step_cpu_seconds": 15.0}
LONGEST = 180.0  # seconds that a round may take
LOOK_EVERY = 0.005


def round_of(folder: Path, number: int, model: Path) -> dict[str, float]:
    """One start of the command, until its first step is done."""
    run = folder / f"run-{number}"
    words = ["train", "recipe:algorithms/grpo", f"model.path={model}", f"run.dir={run}"]
    terminal, theirs = pty.openpty()
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "reinforge", *words],
        cwd=folder,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    seen = b""
    found: dict[str, float] = {}
    cpu = 0.0
    try:
        while "first_step_seconds" not in found:
            elapsed = time.monotonic() - began
            if process.poll() is not None or elapsed > LONGEST:
                raise SystemExit(f"no first step:\n{seen.decode(errors='replace')}")
            if select.select([terminal], [], [], LOOK_EVERY)[0]:
                seen += os.read(terminal, 65536)
            if b"\n" in seen and "first_line_seconds" not in found:
                found["first_line_seconds"] = time.monotonic() - began
                assert seen.startswith(b"reinforge "), seen  # and no complaint
            cpu = max(cpu, cpu_seconds(process.pid))
            if first_step_is_logged(run):
                found["first_step_seconds"] = time.monotonic() - began
                found["first_step_cpu_seconds"] = cpu
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(terminal)
    return found


def first_step_is_logged(run: Path) -> bool:
    log = run / "metrics.jsonl"
    return log.exists() and '"time/step"' in log.read_text()


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, of its children that have ended, and of those that run."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    own = sum(map(int, stat[11:15])) / os.sysconf("SC_CLK_TCK")
    return own + sum(cpu_seconds(int(child)) for child in children)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="reinforge-first-line-") as name:
        folder = Path(name)
        model = folder / "tiny"
        made = [sys.executable, "-m", "reinforge", "tiny", str(model)]
        subprocess.run(made, check=True, stdout=subprocess.DEVNULL)
        rounds = [round_of(folder, number, model) for number in range(asked.rounds)]
    for one in rounds:
        print(json.dumps({key: round(value, 3) for key, value in one.items()}))
    result = summary(rounds)
    print(json.dumps(result, indent=1))
    if asked.out is not None:
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
    missed = [name for name, limit in LIMITS.items() if result[name] > limit]
    for name in missed:
        print(f"missed: {name} is {result[name]:.2f}, and at most {LIMITS[name]:g} is wanted")
    raise SystemExit(1 if missed else 0)


def summary(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """The medians, and what they were measured on."""
    medians = {key: round(median(one[key] for one in rounds), 3) for key in rounds[0]}
    return {
        **medians,
        "limits": LIMITS,
        "rounds": rounds,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "python": platform.python_version(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }


if __name__ == "__main__":
    main()
