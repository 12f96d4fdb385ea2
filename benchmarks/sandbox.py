"""What containment costs per run, and whether it holds: attacks tried and held, and judged samples
of which a tenth are hostile.

    python benchmarks/sandbox.py [--runs 1000] [--timed 200] [--backend namespaces|bubblewrap|all]
                                 [--out FILE]

`overhead_ms` is a contained `print(1)` in Python less the same in a plain subprocess, one after the
other on an otherwise idle pool; `call_ms` a judged solution with three calls. The attacks are those
of sandbox_attacks.py; what they need (gcc, node) and is not there is named. A way of containment
that does not work here is named with the reason, and the other one is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from leftovers import descriptors, left_behind
from sandbox_attacks import ASSERTS, CALLS, CHEATS, CONTAINED, RIGHT

from reinforge.rewards.code import CodeReward
from reinforge.sandbox import Limits, Pool, Program, run_sync
from reinforge.sandbox.detect import missing
from reinforge.sandbox.isolation import Isolation
from reinforge.sandbox.judge import JudgeRules, judge_asserts, judge_calls
from reinforge.sandbox.program import interpreter

WAYS = {"namespaces": "own", "bubblewrap": "bwrap"}
COMPILERS = {"c": "gcc", "node": "node"}


def timed(count: int, work: Callable[[], Any]) -> list[float]:
    out = []
    for _ in range(count):
        start = time.perf_counter()
        work()
        out.append((time.perf_counter() - start) * 1e3)
    return sorted(out)


def spent() -> float:
    """Milliseconds of processor time of all children that have ended, which a busy machine does not
    change much.
    """
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (used.ru_utime + used.ru_stime) * 1e3


def told(times: list[float], less: float = 0.0) -> dict[str, float]:
    return {
        "median": round(statistics.median(times) - less, 1),
        "p99": round(times[int(0.99 * len(times))] - less, 1),
    }


def costs(isolation: Isolation, count: int) -> dict[str, Any]:
    start = spent()
    plain = timed(
        count,
        lambda: subprocess.run(
            [interpreter(), "-I", "-B", "-c", "print(1)"], capture_output=True, check=True
        ),
    )
    middle = spent()
    boxed = timed(count, lambda: run_sync(Program("print(1)"), Limits(), isolation))
    end = spent()
    calls = timed(
        count // 2, lambda: judge_calls(isolation, None, RIGHT, "add", CALLS, JudgeRules())
    )
    base = statistics.median(plain)
    return {
        "plain_ms": told(plain),
        "run_ms": told(boxed),
        "overhead_ms": told(boxed, base),
        "overhead_cpu_ms": round((end + start - 2 * middle) / count, 1),
        "call_ms": told(calls),
        **({"warm_call_ms": told(asyncio.run(warm(count)))} if isolation.mode == "own" else {}),
    }


async def warm(count: int) -> list[float]:
    """The same as the reward does it, in boxes that are used again: with the way to the worker and
    back.
    """
    pool = Pool(1, backend="namespaces", warm=True)
    out = []
    for i in range(count + 5):
        start = time.perf_counter()
        verdict = await pool.call(judge_calls, RIGHT, "add", CALLS, JudgeRules())
        assert verdict.passed == len(CALLS)
        out += [(time.perf_counter() - start) * 1e3] if i >= 5 else []
    pool.close()
    return sorted(out)


def contained(isolation: Isolation) -> dict[str, Any]:
    """Every attack and every cheat once: how many were tried, how many held, and which broke it."""
    tried = 0
    broke = []
    left_out = []
    for attack in CONTAINED:
        if (
            attack.language in COMPILERS
            and shutil.which(COMPILERS[attack.language], path="/usr/bin:/bin") is None
        ):
            left_out.append(f"{attack.name} (no {COMPILERS[attack.language]})")
            continue
        tried += 1
        result = run_sync(
            Program(attack.program(), attack.language),
            Limits(seconds=attack.seconds, memory_mb=256),
            isolation,
        )
        if result.status not in attack.ends or b"ESCAPED" in result.stdout or left_behind():
            broke.append(attack.name)
    rules = JudgeRules(Limits(seconds=1.5, memory_mb=256), 3.0)
    for name, code in CHEATS.items():
        tried += 1
        verdicts = [
            judge_calls(isolation, None, code, "add", CALLS, rules),
            judge_asserts(isolation, None, code, ASSERTS, "add", rules),
        ]
        if any(v.passed or v.failed_here for v in verdicts):
            broke.append(name)
    return {"tried": tried, "held": tried - len(broke), "broke": broke, "left_out": left_out}


def mixed(backend: Any, runs: int, workers: int) -> dict[str, Any]:
    """Honest samples, right and wrong, with a tenth that is hostile: their rewards, and what is
    left when all is over.
    """
    hostile = list(CHEATS.values()) + [
        f"def add(a, b):\n    exec({a.code!r})"
        for a in CONTAINED
        if a.language == "python" and a.seconds < 1
    ]
    rng = random.Random(1)
    completions = []
    expected = []
    for i in range(runs):
        right = rng.random() < 0.5
        code = (
            rng.choice(hostile)
            if i % 10 == 3
            else RIGHT
            if right
            else "def add(a, b): return a - b"
        )
        completions.append(f"{code}\n# {i}")  # the same program would be run once
        expected.append(0.0 if i % 10 == 3 else float(right))
    before = descriptors()
    reward = CodeReward(
        entry_point="add",
        timeout=3.0,
        total_timeout=5.0,
        memory_mb=256,
        workers=workers,
        backend=backend,
    )
    start = time.perf_counter()
    outcome = asyncio.run(reward(completions, tests=[[[a, v] for a, v in CALLS]] * runs))
    seconds = time.perf_counter() - start
    assert reward.pool is not None
    reward.pool.close()
    wrong = [
        i for i, (got, want) in enumerate(zip(outcome.scores, expected, strict=True)) if got != want
    ]
    return {
        "runs": runs,
        "hostile": sum(i % 10 == 3 for i in range(runs)),
        "rewards_changed": len(wrong),
        "unscored": outcome.scores.count(None),
        "tried_again": reward.tried_again,
        "seconds": round(seconds, 1),
        "runs_per_second": round(runs / seconds, 1),
        "orphans": len(left_behind()),
        "leaked_descriptors": descriptors() - before,
        "ends": dict(reward.counts),
    }


def main() -> None:
    """Exits with 1 if an attack broke containment, a reward changed, something was left behind, or
    nothing could be measured.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--timed", type=int, default=200)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--backend", choices=("namespaces", "bubblewrap", "all"), default="all")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    machine = (
        f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, Python"
        f" {platform.python_version()}"
    )
    report: dict[str, Any] = {"machine": f"{machine}, load {os.getloadavg()[0]:.1f}"}
    print(report["machine"], flush=True)
    holds = True
    measured = 0
    for backend in WAYS if given.backend == "all" else (given.backend,):
        reason = missing(WAYS[backend])
        if reason is not None:
            report[backend] = {"missing": reason}
            print(f"{backend}: not here, so not measured: {reason}", flush=True)
            continue
        measured += 1
        found = report[backend] = measure(backend, given.runs, given.timed, given.workers)
        print(backend, json.dumps(found), flush=True)
        after = found["mixed"]
        print(
            f"{backend}: {found['tried']} attacks tried, {found['held']} held,"
            f" {len(found['broke'])} broke it.",
            flush=True,
        )
        holds &= not found["broke"] and not any(
            after[k] for k in ("rewards_changed", "unscored", "orphans", "leaked_descriptors")
        )
    if given.out:
        given.out.write_text(json.dumps(report, indent=1) + "\n")
    if not measured:
        print("nothing contains programs here", flush=True)
    sys.exit(0 if holds and measured else 1)


def measure(backend: Any, runs: int, timed_runs: int, workers: int) -> dict[str, Any]:
    isolation = Isolation(WAYS[backend])
    return (
        costs(isolation, timed_runs)
        | contained(isolation)
        | {"mixed": mixed(backend, runs, workers)}
    )


if __name__ == "__main__":
    main()
