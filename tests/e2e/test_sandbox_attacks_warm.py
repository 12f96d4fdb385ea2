"""The attacks of benchmarks/sandbox_attacks.py against runs that are forked into a root and a
network made beforehand (sandbox/forks.py).
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Iterator

import pytest
from sandbox_attacks import ASSERTS, CHEATS, CONTAINED, RIGHT, Attack

from helpers.sandboxes import containment
from reinforge.sandbox import Limits, Program, run_sync, zygote
from reinforge.sandbox.isolation import Isolation
from reinforge.sandbox.judge import JudgeRules, judge_asserts, judge_calls


@pytest.fixture(scope="module")
def isolation() -> Iterator[Isolation]:
    made = containment("own")
    zygote.enable()
    forks = zygote.ready()
    assert forks is not None and zygote._prepares, "what is made beforehand works here"
    yield made
    zygote._enabled = False
    zygote._running = None
    forks.close()


@pytest.mark.parametrize("attack", CONTAINED, ids=lambda a: a.name)
def test_contained(attack: Attack, isolation: Isolation, monkeypatch: pytest.MonkeyPatch) -> None:
    if (
        attack.language == "node"
        and not os.path.exists("/usr/bin/node")
        or attack.language == "c"
        and not os.path.exists("/usr/bin/gcc")
    ):
        pytest.skip(f"no {attack.language} here")
    secret = f"secret{random.getrandbits(64):x}"
    start = time.monotonic()
    monkeypatch.setenv("REINFORGE_TEST_TOKEN", secret)
    with tempfile.NamedTemporaryFile("w", prefix="reinforge-secret") as file:
        os.chmod(file.name, 0o644)
        file.write(secret)
        file.flush()
        result = run_sync(
            Program(attack.program(file.name), attack.language),
            Limits(seconds=attack.seconds, memory_mb=256),
            isolation,
        )
    assert result.status in attack.ends, result
    assert (
        b"ESCAPED" not in result.stdout and secret.encode() not in result.stdout + result.stderr
    ), result
    assert time.monotonic() - start < attack.seconds + 20
    after = run_sync(
        Program(
            "import os; print(sorted(os.listdir('/tmp')), [n for n in os.listdir('/proc') if"
            " n.isdigit()])"
        ),
        Limits(),
        isolation,
    )
    assert after.stdout == b"['main.py'] ['2']\n", after  # whoever comes next finds nothing of it


@pytest.mark.parametrize("name", CHEATS)
def test_no_cheat_is_paid(name: str, isolation: Isolation) -> None:
    rules = JudgeRules(Limits(seconds=1.5, memory_mb=200), total_seconds=6)
    calls = [([2, 3], 5), ([10, -4], 6)]
    assert judge_calls(isolation, None, CHEATS[name], "add", calls, rules).passed == 0
    assert judge_asserts(isolation, None, CHEATS[name], ASSERTS, "add", rules).passed == 0
    assert judge_calls(isolation, None, RIGHT, "add", calls, JudgeRules()).passed == 2
