"""`reinforge plan`: finds what is wrong with a configuration before a model is loaded.

Phase 1 (`preflight`) imports neither torch nor transformers and takes well under five seconds.
Phase 2 (`checks`) reads data and runs rewards, in a process group of its own that is killed at the
deadline. With `--deep` phase 3 (`deep`) follows in the same process: proofs on the rows' text, one
step at toy size, what fits and what would help. What it takes to import libraries is not counted:
on a busy machine or a slow disk that is most of it, and nothing in a configuration makes it faster.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from reinforge.build.predict import shown
from reinforge.config.schema import Config
from reinforge.plan.options import PlanOptions
from reinforge.plan.preflight import IMPORTING, PlanReport, check_run_dir, check_settings

DEADLINE_SECONDS = 30.0
DEEP_DEADLINE_SECONDS = 120.0
IMPORT_SECONDS = 600.0  # for importing libraries, beside the deadline
LOOK_SECONDS = 0.05  # how often the worker is looked at
STAGE = re.compile(rb"^stage: (.*)\n", re.MULTILINE)


def plan_run(
    config: Config,
    config_path: Path,
    overrides: Sequence[str] = (),
    *,
    deadline: float | None = None,
    options: PlanOptions | None = None,
) -> PlanReport:
    """All phases for the config that was read from `config_path` with `overrides`.

    Phase 2 runs only if phase 1 found nothing wrong but the run directory: who chooses another one
    should not meet the next error then.
    """
    options = options or PlanOptions()
    report = check_settings(config)
    if report.ok:
        seconds = seconds_for(options, deadline)
        report.extend(worker_report(config_path, overrides, seconds, options=options))
    check_run_dir(config, report)
    return report


def seconds_for(options: PlanOptions, deadline: float | None) -> float:
    """How long the checks of one run may take; None: what is usual."""
    usual = DEEP_DEADLINE_SECONDS if options.deep else DEADLINE_SECONDS
    return usual if deadline is None else deadline


def worker_report(
    config_path: Path,
    overrides: Sequence[str],
    deadline: float,
    module: str = "reinforge.plan.checks",
    options: PlanOptions | None = None,
) -> dict[str, Any]:
    """Phases 2 and 3 in a process that cannot hang us: its whole group is killed at the deadline,
    or when we are interrupted.
    """
    asked = (options or PlanOptions()).arguments()
    command = [sys.executable, "-m", module, str(config_path), *overrides, *asked, "--json"]
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env=_environment(),
    )
    assert process.stdout is not None and process.stderr is not None
    out = _PipeTail(process.stdout, 1 << 22)
    err = _PipeTail(process.stderr, 1 << 16)
    try:
        late = _wait(process, err, deadline)
    finally:
        _kill_group(process)
    if late and _imports(err.stage):
        what = f"{err.stage or 'starting Python'} took more than {IMPORT_SECONDS:g} s."
        return _failed(what, "The machine is too busy, or its disk too slow.")
    if late:
        what = (
            f"the data and reward checks did not end within {deadline:g} s and were killed, while"
            f" {err.stage}."
        )
        fix = (
            "Make that step faster, use a smaller data.limit, or give `plan` more time with"
            " --deadline."
        )
        return _failed(what, fix)
    try:
        found: dict[str, Any] = json.loads(out.text())
    except json.JSONDecodeError:
        last = next(
            (line for line in reversed(err.text().splitlines()) if line.strip()), "no output"
        )
        how = (
            f"was killed by signal {-process.returncode}"
            if process.returncode < 0
            else f"ended with code {process.returncode}"
        )
        return _failed(
            f"the data and reward checks {how}, while {err.stage or 'starting'}: {last}",
            "Run `python -m reinforge.plan.checks CONFIG` to see all of it.",
        )
    found["summary"]["check_seconds"] = round(time.monotonic() - start, 1)
    return found


def prompt_tokens(config_path: Path, overrides: Sequence[str]) -> float | None:
    """The median prompt, as phase 2 counts it; None: it is not known, for want of rows or of the
    tokenizer.
    """
    found = worker_report(config_path, overrides, DEADLINE_SECONDS)
    counted = found["summary"].get("prompt_tokens")
    return None if counted is None else float(counted["median"])


def _failed(what: str, fix: str) -> dict[str, Any]:
    return {"errors": [f"plan: {what} {fix}"], "warnings": [], "summary": {}}


def _environment() -> dict[str, str]:
    """Ours, with short hub timeouts, no progress bars, one thread per tokenizer, and this very
    package on the path.
    """
    package_root = str(Path(__file__).resolve().parents[2])
    quiet = {
        "HF_HUB_ETAG_TIMEOUT": "5",
        "HF_HUB_DOWNLOAD_TIMEOUT": "10",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    path = os.pathsep.join(
        part for part in (package_root, os.environ.get("PYTHONPATH", "")) if part
    )
    return {**quiet, **os.environ, "PYTHONPATH": path}


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        # also after a normal end: whatever the rewards started goes with it
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # nothing is left of it
        pass
    process.wait()


def _wait(process: subprocess.Popen[bytes], err: _PipeTail, deadline: float) -> bool:
    """Waits for the process to end; True where it took longer than it may.

    Importing has a clock of its own.
    """
    checking = importing = 0.0
    last = time.monotonic()
    while True:
        try:
            process.wait(LOOK_SECONDS)
            return False
        except subprocess.TimeoutExpired:
            now = time.monotonic()
        if _imports(err.stage):
            importing += now - last
        else:
            checking += now - last
        last = now
        if checking > deadline or importing > IMPORT_SECONDS:
            return True


def _imports(stage: str) -> bool:
    """Whether a stage is the time before the checks begin, or the import of a library that they
    need.
    """
    return not stage or stage.startswith(IMPORTING)


class _PipeTail:
    """Drains a pipe in a thread and keeps the last bytes, so that a flood of output can neither
    block nor fill memory. `stage` is what the newest line `stage: ...` said.
    """

    def __init__(self, pipe: IO[bytes], limit: int):
        self._pipe = pipe
        self._limit = limit
        self.stage = ""
        self._chunks: deque[bytes] = deque()
        self._thread = threading.Thread(target=self._drain, daemon=True)
        self._thread.start()

    def _drain(self) -> None:
        size = 0
        rest = b""  # the beginning of a line whose end has not come yet
        while chunk := os.read(self._pipe.fileno(), 1 << 16):
            for said in STAGE.finditer(rest + chunk):
                self.stage = said.group(1).decode(errors="replace")
            rest = (rest + chunk).rpartition(b"\n")[2][:200]
            self._chunks.append(chunk)
            size += len(chunk)
            while size - len(self._chunks[0]) >= self._limit:
                size -= len(self._chunks.popleft())

    def text(self) -> str:
        self._thread.join(2.0)
        return b"".join(list(self._chunks)).decode(errors="replace")


def describe(report: PlanReport) -> list[tuple[str, str]]:
    """The summary as (label, text) lines for people."""
    s = report.summary
    lines = [
        ("model", s.get("model")),
        ("trained", s.get("trained")),
        ("algorithm", s.get("algorithm")),
        ("backend", s.get("backend")),
    ]
    if "weights" in s:
        lines.append(("weights", _weights(s["weights"])))
    if "data" in s:
        lines.append(("data", "; ".join(s["data"])))
    if "rows" in s:
        lines.append(
            ("rows", f"{s['rows']['train']:,} to train on, {s['rows']['eval']:,} held out")
        )
    for name in {"prompt_tokens", "row_tokens"} & s.keys():
        p = s[name]
        lines.append(
            (
                name.replace("_", " "),
                (
                    f"min {p['min']}, median {p['median']}, p90 {p['p90']}, max {p['max']}; limit"
                    f" {p['limit']} ({p['checked']:,} rows checked)"
                ),
            )
        )
    for name in ("dropped", "truncated"):
        if name in s:
            lines.append(
                (
                    name,
                    ", ".join(f"{n:,} {kind} rows" for kind, n in s[name].items()) + ": too long",
                )
            )
    if "samples_per_step" in s:
        tokens = (
            f", at most {s['new_tokens_per_step_at_most']:,} new tokens"
            if "new_tokens_per_step_at_most" in s
            else ""
        )
        updates = (
            f", {s['optimizer_steps_per_step']} updates"
            if s["optimizer_steps_per_step"] > 1
            else ""
        )
        lines.append(("one step", f"{s['samples_per_step']:,} samples{tokens}{updates}"))
        lines.append(
            (
                "steps",
                (
                    str(s["steps"])
                    if s["steps"] is not None
                    else "from train.epochs, once the rows are read"
                ),
            )
        )
    lines += [(name, s[name]) for name in ("rollouts", "compile", "answers", "drafts") if name in s]
    for name, scores in s.get("rewards", {}).items():
        lines.append(
            (
                f"reward {name}",
                ", ".join(
                    f"{kind} {'unscored' if v is None else f'{v:.3g}'}"
                    for kind, v in scores.items()
                ),
            )
        )
    if "prediction" in s:
        lines += shown(s["prediction"])
        if s.get("steps"):
            whole = s["steps"] * sum(s["prediction"]["seconds"].values())
            lines.append(
                (
                    "time of the run",
                    f"about {_span(whole)}, {s['steps']:,} such steps;"
                    " start, evaluations and checkpoints come on top",
                )
            )
    lines.append(("run directory", s.get("run_dir")))
    return [(label, str(text)) for label, text in lines if text is not None]


def _span(seconds: float) -> str:
    """
    >>> _span(42), _span(400), _span(5400)
    ('42 s', '7 min', '1.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _weights(kinds: dict[str, int]) -> str:
    """
    >>> _weights({"embedding": 2_000_000, "attention": 500_000, "adapter": 1_234})
    '2.5 M: embedding 2 M, attention 500 k; adapter 1.23 k'
    """
    base = {kind: count for kind, count in kinds.items() if kind != "adapter"}
    listed = ", ".join(f"{kind} {short_count(count)}" for kind, count in base.items())
    added = f"; adapter {short_count(kinds['adapter'])}" if "adapter" in kinds else ""
    return f"{short_count(sum(base.values()))}: {listed}{added}"


def short_count(count: int) -> str:
    """
    >>> short_count(8_190_735_360), short_count(999), short_count(311_164_928)
    ('8.19 B', '999', '311 M')
    """
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)


def describe_deep(found: dict[str, Any]) -> list[tuple[str, str]]:
    """What phase 3 found beside its proofs, as (label, text) lines for people."""
    lines = []
    if "fits" in found:
        lines.append(("fits", found["fits"]["said"]))
    for i, change in enumerate(found.get("changes", ())):
        lines.append((f"change {i + 1}", f"{change['change']}: {gains(change)}"))
    return lines


def gains(change: dict[str, Any]) -> str:
    """
    >>> gains({"fits": True, "memory_gib": [30.0, 10.0], "step_seconds": [2.0, 2.5]})
    'memory 30.0 to 10.0 GiB, a step 2 to 2.5 s'
    """
    memory, seconds = change["memory_gib"], change["step_seconds"]
    fits = "" if change["fits"] else ", which is still too much"
    return (
        f"memory {memory[0]:.1f} to {memory[1]:.1f} GiB{fits}, a step {seconds[0]:.3g} to"
        f" {seconds[1]:.3g} s"
    )
