"""Everything we could think of to break out of the sandbox, to stay in it, or to be paid for a
wrong solution.
"""

from __future__ import annotations

import ast
import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from leftovers import descriptors, left_behind
from sandbox_attacks import ASSERTS, CALLS, CHEATS, CONTAINED, RIGHT, Attack

from helpers.sandboxes import WAYS, containment
from reinforge.rewards.code import CodeReward
from reinforge.sandbox import Limits, Program, run_sync
from reinforge.sandbox.isolation import Isolation
from reinforge.sandbox.judge import JudgeRules, judge_asserts, judge_calls, judge_stdin

LIMITS = Limits(memory_mb=256)
RULES = JudgeRules(Limits(seconds=1.5, memory_mb=256), total_seconds=3.0)


@pytest.fixture(scope="module", params=WAYS)
def isolation(request: pytest.FixtureRequest) -> Isolation:
    return containment(request.param)


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Path]]:
    """In our environment, our memory and a file that anybody may read."""
    text = f"secret{random.getrandbits(64):x}"
    monkeypatch.setenv("REINFORGE_TEST_TOKEN", text)
    with tempfile.NamedTemporaryFile("w", prefix="reinforge-secret") as file:
        os.chmod(file.name, 0o644)
        file.write(text)
        file.flush()
        yield text, Path(file.name)


@pytest.mark.parametrize("attack", CONTAINED, ids=lambda a: a.name)
def test_contained(attack: Attack, isolation: Isolation, secret: tuple[str, Path]) -> None:
    if (
        attack.language == "node"
        and not os.path.exists("/usr/bin/node")
        or attack.language == "c"
        and not os.path.exists("/usr/bin/gcc")
    ):
        pytest.skip(f"no {attack.language} here")
    before = descriptors()
    start = time.monotonic()
    limits = Limits(seconds=attack.seconds, memory_mb=256)
    result = run_sync(Program(attack.program(str(secret[1])), attack.language), limits, isolation)
    assert result.status in attack.ends, result
    assert b"ESCAPED" not in result.stdout, result
    assert secret[0].encode() not in result.stdout + result.stderr
    assert len(result.stdout) <= 1 << 20 and len(result.stderr) <= 1 << 20
    assert time.monotonic() - start < attack.seconds + 20
    assert left_behind() == [] and descriptors() == before


def test_the_program_sees_little(isolation: Isolation) -> None:
    code = (
        "import os; print(os.getuid(), os.listdir('.'), sorted(os.environ), os.listdir('/dev'),"
        " os.path.exists('/etc/shadow'), os.path.exists('/sys'))"
    )
    out = run_sync(Program(code), LIMITS, isolation).stdout.decode()
    assert out.startswith(
        "1000 ['main.py'] ['HOME', 'LANG', 'OMP_NUM_THREADS', 'PATH', 'REINFORGE_RUN', 'TMPDIR',"
        " 'USER'] ["
    )
    assert sorted(ast.literal_eval(out.split("] ")[2] + "]")) == [
        "fd",
        "full",
        "null",
        "random",
        "shm",
        "urandom",
        "zero",
    ]
    assert out.endswith("False False\n")
    status = run_sync(
        Program("print(open('/proc/self/status').read())"), LIMITS, isolation
    ).stdout.decode()
    fields = dict(line.split(":\t") for line in status.splitlines() if ":\t" in line)
    assert [fields[k] for k in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")] == ["0" * 16] * 5
    assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
    assert (
        run_sync(
            Program(
                "import os; print(os.listdir('/sys/class/net') if os.path.exists('/sys') else"
                " open('/proc/net/dev').read().count(':'))"
            ),
            LIMITS,
            isolation,
        ).stdout
        == b"1\n"
    )


@pytest.mark.parametrize("cheat", CHEATS)
def test_no_cheat_is_paid(cheat: str, isolation: Isolation) -> None:
    code = CHEATS[cheat]
    start = time.monotonic()
    called = judge_calls(isolation, None, code, "add", CALLS, RULES)
    asserted = judge_asserts(isolation, None, code, ASSERTS, "add", RULES)
    printed = judge_stdin(isolation, None, Program(code), [("2 3", "5")], RULES)
    for verdict in (called, asserted, printed):
        assert verdict.passed == 0 and not verdict.failed_here, verdict
    assert time.monotonic() - start < 40
    assert left_behind() == []


def test_the_right_solution_is_paid(isolation: Isolation) -> None:
    assert judge_calls(isolation, None, RIGHT, "add", CALLS, RULES).passed == 3
    assert judge_asserts(isolation, None, RIGHT, ASSERTS, "add", RULES).passed == len(ASSERTS)


def test_a_cheat_sees_one_call_at_a_time_and_never_what_is_expected(isolation: Isolation) -> None:
    """It copies all it can read from its channel and its memory; the later arguments and the
    answers are not in it.
    """
    code = """
import os, gc
def add(a, b):
    os.set_blocking(3, False)
    try: ahead = os.read(3, 65536)
    except BlockingIOError: ahead = b""
    held = [o for o in gc.get_objects() if isinstance(o, (list, dict))]
    return "clean" if not ahead and "987654321" not in repr(held) else "seen"
"""
    verdict = judge_calls(
        isolation, None, code, "add", [([1, 1], "clean"), ([987654321, 0], 987654321)], RULES
    )
    assert verdict.passed == 1, verdict


def test_when_the_trainer_is_killed_its_programs_die_too(isolation: Isolation) -> None:
    code = f"""
from reinforge.sandbox import Limits, Program, run_sync
from reinforge.sandbox.isolation import Isolation
program = Program("import os, time\\nif os.fork() == 0: os.setsid()\\ntime.sleep(60)")
run_sync(program, Limits(seconds=60), Isolation({isolation.mode!r}))
"""
    trainer = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    until = time.monotonic() + 60
    while len(left_behind(trainer.pid)) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    trainer.kill()
    trainer.wait()
    until = time.monotonic() + 10
    while left_behind(trainer.pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert left_behind(trainer.pid) == []


@pytest.mark.parametrize("runs", [50, pytest.param(200, marks=pytest.mark.long)])
def test_many_runs_a_tenth_of_them_hostile(isolation: Isolation, runs: int) -> None:
    """Honest samples get what they get alone; nothing stays: no process, no file, no descriptor."""
    hostile = [c for c in CHEATS.values()] + [
        f"def add(a, b):\n    exec({a.code!r})"
        for a in CONTAINED
        if a.language == "python" and a.seconds == 0.7
    ]
    rng = random.Random(7)
    backend = "bubblewrap" if isolation.mode == "bwrap" else "namespaces"
    completions = []
    expected = []
    for i in range(runs):
        if i % 10 == 3:
            # the same program would be run once
            completions.append(f"{rng.choice(hostile)}\n# {i}")
            expected.append(0.0)
        else:
            right = rng.random() < 0.5
            answer = RIGHT if right else "def add(a, b):\n    return a - b"
            completions.append(f"Here:\n```python\n{answer}\n# {i}\n```")
            expected.append(float(right))
    before = descriptors()
    files = set(os.listdir(tempfile.gettempdir()))
    reward = CodeReward(
        entry_point="add", timeout=3.0, total_timeout=5.0, memory_mb=256, workers=4, backend=backend
    )
    outcome = asyncio.run(_scored(reward, completions))
    assert reward.pool is not None
    reward.pool.close()
    assert outcome == expected
    assert reward.counts["failed_here"] == 0 and sum(reward.counts.values()) == runs
    assert left_behind() == []
    assert descriptors() == before
    others = (
        *("secret", "plan", "agent", "tiny", "check", "build", "release", "rows", "tokens"),
        *("ui", "dry", "replay", "test"),
    )
    beside = tuple(f"reinforge-{what}" for what in others)
    assert {
        f
        for f in set(os.listdir(tempfile.gettempdir())) - files
        if "reinforge" in f and not f.startswith(beside)
    } == set()  # those are of other tests, which run at the same time


async def _scored(reward: CodeReward, completions: list[str]) -> list[float | None]:
    return (
        await reward(
            completions, tests=[[[args, value] for args, value in CALLS]] * len(completions)
        )
    ).scores
