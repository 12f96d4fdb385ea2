"""One contained run: what comes back, which limit ended it, and what is refused.

Attacks are in tests/e2e/test_sandbox_attacks.py.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import platform
import re
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from leftovers import descriptors, left_behind

from helpers.sandboxes import WAYS, containment
from reinforge.core.errors import InputError
from reinforge.sandbox import Limits, Pool, Program, detect, run, run_sync
from reinforge.sandbox import isolation as isolations
from reinforge.sandbox.detect import choose
from reinforge.sandbox.isolation import Isolation
from reinforge.sandbox.judge import (
    JudgeRules,
    judge_asserts,
    judge_beside,
    judge_calls,
    judge_stdin,
    same_output,
    same_value,
)
from reinforge.sandbox.plain import KEYS, Opaque, decode, dumps, encode, loads
from reinforge.sandbox.process import Process
from reinforge.sandbox.program import interpreter
from reinforge.sandbox.seccomp import (
    ALLOW,
    DENIED,
    KILL,
    LAST,
    MACHINES,
    OWN,
    QUIET,
    SPECIAL,
    bpf_filter,
)

RULES = JudgeRules(Limits(seconds=10), total_seconds=20)


@pytest.fixture(scope="module", params=WAYS)
def isolation(request: pytest.FixtureRequest) -> Isolation:
    return containment(request.param)


# -- one run


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("python", "print(int(input()) * 2)"),
        ("bash", "read a; echo $((a * 2))"),
        ("c", '#include <stdio.h>\nint main(){int a;scanf("%d",&a);printf("%d\\n",a*2);}'),
        ("node", "console.log(Number(require('fs').readFileSync(0,'utf8'))*2)"),
    ],
)
def test_doubles(language: str, code: str, isolation: Isolation) -> None:
    result = run_sync(Program(code, language, "21\n"), Limits(), isolation)
    if "not installed" in result.reason:
        pytest.skip(result.reason)
    assert (result.status, result.exit_code, result.signal, result.stdout, result.unsafe) == (
        "ok",
        0,
        None,
        b"42\n",
        False,
    ), result
    assert 0 < result.seconds < 10 and 0 < result.memory_mb < 512


def test_each_end_has_its_name(isolation: Isolation) -> None:
    def ended(code: str, **limits: Any) -> tuple[Any, ...]:
        result = run_sync(Program(code), Limits(**limits), isolation)
        return result.status, result.exit_code, result.signal

    assert ended("import sys; sys.exit(7)") == ("crashed", 7, None)
    assert ended("import os; os.kill(os.getpid(), 11)") == ("crashed", None, 11)
    assert ended("import os; os.kill(os.getpid(), 9)") == ("killed", None, 9)
    assert ended("while True: pass", seconds=0.3) == ("timeout", None, None)
    assert ended("while True: pass", seconds=30, cpu_seconds=1)[0::2] == ("timeout", 24)
    assert ended("x = bytes(300 << 20)", memory_mb=256)[0] == "memory"
    assert ended("print('x' * 5000)", output_kb=4)[0] == "output"
    assert ended("open('f', 'wb').write(bytes(5 << 20))", disk_mb=4)[0] in ("crashed", "output")
    assert left_behind() == []


def test_the_clock_starts_with_the_program_and_covers_its_children(isolation: Isolation) -> None:
    start = time.monotonic()
    result = run_sync(
        Program("(sleep 30; echo late) & sleep 30", "bash"), Limits(seconds=0.5), isolation
    )
    assert (
        result.status == "timeout" and 0.5 <= result.seconds < 1.5 and time.monotonic() - start < 10
    )


def test_output_is_cut_where_the_cap_is(isolation: Isolation) -> None:
    result = run_sync(
        Program("import sys\nprint('e' * 10, file=sys.stderr)\nwhile True: print('x' * 99)"),
        Limits(output_kb=8),
        isolation,
    )
    assert (
        result.status == "output"
        and len(result.stdout) == 8192
        and result.stdout[:100] == b"x" * 99 + b"\n"
    )


def test_a_large_stdin_arrives_and_one_that_is_not_read_does_no_harm(isolation: Isolation) -> None:
    text = b"0123456789" * 100_000
    assert (
        run_sync(
            Program("import sys; print(len(sys.stdin.read()))", stdin=text), Limits(), isolation
        ).stdout
        == b"1000000\n"
    )
    assert run_sync(Program("print('no')", stdin=text), Limits(), isolation).stdout == b"no\n"


def test_files_beside_the_program(isolation: Isolation) -> None:
    program = Program(
        "print(open('data/a.txt').read(), open('b').read())",
        files={"data/a.txt": "one", "b": b"two"},
    )
    assert run_sync(program, Limits(), isolation).stdout == b"one two\n"
    for name in ("../a", "/etc/a", "a/../../b", ""):
        with pytest.raises(InputError, match="no name for a file"):
            Program("", files={name: ""})


def test_packages_are_there_only_if_named(isolation: Isolation, tmp_path: Any) -> None:
    (tmp_path / "mine.py").write_text("value = 5")
    tmp_path.chmod(0o755)
    folder = str(tmp_path)
    code = "import mine; print(mine.value)"
    assert run_sync(Program(code), Limits(), isolation).status == "crashed"
    assert run_sync(Program(code), Limits(packages=(folder,)), isolation).stdout == b"5\n"
    assert (
        run_sync(
            Program("open('/packages/0/x', 'w')"), Limits(packages=(folder,)), isolation
        ).status
        == "crashed"
    )
    assert (
        judge_calls(
            isolation,
            None,
            "import mine\ndef f(): return mine.value",
            "f",
            [([], 5)],
            JudgeRules(Limits(packages=(folder,))),
        ).passed
        == 1
    )


def test_useful_things_still_work(isolation: Isolation) -> None:
    """asyncio, threads, processes and temporary files: an honest solution may want them."""
    code = """
import asyncio, tempfile, threading, subprocess, multiprocessing
async def one(): return 1
print(asyncio.run(one()))
t = threading.Thread(target=lambda: print(2)); t.start(); t.join()
print(subprocess.run(["echo", "3"], capture_output=True, text=True).stdout.strip())
with tempfile.TemporaryFile() as f: print(f.write(b"four"))
with multiprocessing.Pool(2) as p: print(p.map(abs, [-5]))
"""
    result = run_sync(Program(code), Limits(), isolation)
    assert result.stdout == b"1\n2\n3\n4\n[5]\n", result


# -- many, and refusals


def test_the_pool_is_bounded_and_cancelling_kills() -> None:
    containment("own")
    before = descriptors()

    async def many() -> None:
        pool = Pool(3, backend="namespaces")
        start = time.monotonic()
        results = await asyncio.gather(
            *[pool.run(Program("import time; time.sleep(0.4); print(1)")) for _ in range(6)]
        )
        # two rounds of three
        assert [r.stdout for r in results] == [b"1\n"] * 6 and time.monotonic() - start >= 0.8
        task = asyncio.ensure_future(
            pool.run(Program("import time; time.sleep(60)"), Limits(seconds=60))
        )
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(pool.close)

    asyncio.run(many())
    assert left_behind() == [] and descriptors() == before


def test_alone_means_that_nothing_else_of_the_pool_runs() -> None:
    """It waits for those that run, and those that come later wait for it."""
    containment("own")
    let_go = threading.Event()
    lock = threading.Lock()
    running = [0]
    seen = []

    def work(isolation: Isolation, cancel: threading.Event, name: str) -> None:
        with lock:
            running[0] += 1
            seen.append((name, running[0]))
        if name == "first":
            let_go.wait(60)
        time.sleep(0.05)
        with lock:
            seen.append((f"{name} over", running[0]))
            running[0] -= 1

    async def go() -> None:
        pool = Pool(4, backend="namespaces")
        first = asyncio.ensure_future(pool.call(work, "first"))
        while not seen:
            await asyncio.sleep(0.01)
        moment = time.monotonic()
        alone = asyncio.ensure_future(pool.call_alone(work, "alone"))
        while not pool._turns._alone:
            await asyncio.sleep(0.01)
        later = [asyncio.ensure_future(pool.call(work, "later")) for _ in range(2)]
        await asyncio.sleep(0.1)
        assert seen == [("first", 1)] and pool.running_since(moment)
        let_go.set()
        await asyncio.gather(first, alone, *later)
        assert not pool.running_since(time.monotonic())
        await asyncio.to_thread(pool.close)

    asyncio.run(go())
    assert (
        seen[:4] == [("first", 1), ("first over", 1), ("alone", 1), ("alone over", 1)]
        and len(seen) == 8
    )


def test_where_nothing_contains_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "missing", lambda mode: "unshare: Operation not permitted")
    with pytest.raises(
        InputError, match=r"cannot be contained here \(bubblewrap: unshare.*allow_unsafe: true"
    ):
        choose()
    result = asyncio.run(run(Program("print('ran')")))
    assert (
        result.status == "refused"
        and result.stdout == b""
        and result.failed_here
        and "unshare" in result.reason
    )
    bare = choose(allow_unsafe=True)
    assert bare.unsafe
    result = run_sync(Program("import os; print(os.getcwd())"), Limits(), bare)
    assert result.status == "ok" and result.unsafe
    assert not os.path.exists(result.stdout.decode().strip())  # its folder is gone
    start = time.monotonic()
    late = run_sync(Program("sleep 30 & sleep 30", "bash"), Limits(seconds=0.3), bare)
    assert late.status == "timeout" and late.unsafe and time.monotonic() - start < 8
    assert left_behind() == []


def test_a_missing_primitive_is_named(
    isolation: Isolation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher fails at the first thing that it cannot do, says which, and starts nothing."""
    layout = isolations.layout
    monkeypatch.setattr(
        isolations,
        "layout",
        lambda packages=(): replace(
            layout(), binds=(*layout().binds, ("/no/such/folder", "/no/such/folder"))
        ),
    )
    result = run_sync(Program("print('ran')"), Limits(), isolation)
    assert (
        result.status == "refused"
        and result.failed_here
        and result.stdout == b""
        and "/no/such/folder" in result.reason
    )
    monkeypatch.undo()
    monkeypatch.setattr(detect, "bpf_filter", lambda: None)
    assert (
        detect.missing.__wrapped__("own")
        == f"no system call filter for {os.uname().machine} (seccomp)"
    )


def test_a_sandbox_that_failed_before_we_held_it_still_says_why(
    isolation: Isolation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Process 1 may be gone when we open a handle on it; the reason is in its report,
    not in that.
    """
    layout = isolations.layout
    broken = replace(layout(), binds=(*layout().binds, ("/no/such/folder", "/no/such/folder")))
    monkeypatch.setattr(isolations, "layout", lambda packages=(): broken)

    def gone(pid: int) -> int:
        raise ProcessLookupError(3, "No such process")

    monkeypatch.setattr(os, "pidfd_open", gone)
    result = run_sync(Program("print('ran')"), Limits(), isolation)
    assert result.status == "refused" and "/no/such/folder" in result.reason, result


def test_wrong_limits_are_told() -> None:
    with pytest.raises(InputError, match="memory_mb must be above 0"):
        Limits(memory_mb=0)
    assert "unknown language 'cobol'" in run_sync(Program("", "cobol")).reason


# -- the filter


def verdict_of(code: bytes, arch: int, nr: int, *args: int) -> int:
    """What the kernel would do: runs the filter."""
    data = struct.pack("<IIQ6Q", nr, arch, 0, *args, *[0] * (6 - len(args)))
    ops = [struct.unpack_from("<HBBI", code, i) for i in range(0, len(code), 8)]
    at = value = 0
    while True:
        op, true, false, k = ops[at]
        if op == 0x06:
            return k
        if op == 0x20:
            (value,) = struct.unpack_from("<I", data, k)
            at += 1
        elif op == 0x54:
            value &= k
            at += 1
        else:
            hit = {0x15: value == k, 0x35: value >= k, 0x45: bool(value & k)}[op]
            at += 1 + (true if hit else false)


@pytest.mark.parametrize("machine", MACHINES)
def test_the_filter_refuses_what_it_lists_and_nothing_else(machine: str) -> None:
    code = bpf_filter(machine)
    assert code is not None and bpf_filter("pdp11") is None
    column, arch = MACHINES[machine]
    denied = {numbers[column] for numbers in DENIED.values()} | {
        SPECIAL["clone3"][column],
        SPECIAL["socket"][column],
    }
    quiet = {numbers[column] for numbers in QUIET.values()}
    for nr in range(LAST + 1):  # with every argument 0
        assert (verdict_of(code, arch, nr) != ALLOW) == (
            nr in denied | quiet or nr == SPECIAL["socketpair"][column]
        ), nr
    assert {verdict_of(code, arch, nr) for nr in quiet} == {0x50000}  # "done"
    assert verdict_of(code, 0x40000003, 20) == KILL  # 32-bit calls


@pytest.mark.parametrize("machine", MACHINES)
def test_a_call_newer_than_the_filter_does_not_exist(machine: str) -> None:
    code = bpf_filter(machine)
    arch = MACHINES[machine][1]
    assert code is not None
    for nr in (*range(LAST + 1, 600), 1000, 0x3FFFFFFF):
        assert verdict_of(code, arch, nr) == 0x50000 | 38, nr
    others = {verdict_of(code, arch, nr) for nr in (0x40000000, 0x40000000 + 59, 0xFFFFFFFF)}
    assert others == ({KILL} if machine == "x86_64" else {0x50000 | 38})  # x32, which ARM has not


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("name", "refused", "allowed"),
    [
        ("clone", (0x10000011,), (0x3D0F00,)),
        ("clone", (0x3D0B00,), (0x4011,)),  # a thread with descriptors of its own; vfork
        ("socketpair", (16,), (1,)),
        ("ioctl", (0, 0x5412), (0, 0x5401)),
        ("mmap", (0, 9, 3, 0x21), (0, 9, 3, 0x22)),  # shared and anonymous; private
        ("mmap", (0, 9, 3, 0x40022), (0, 9, 3, 0x01)),  # huge pages; a file
        ("sendto", (3, 0, 0, 0, 1 << 40), (3, 0, 0, 0, 0)),
        ("setpriority", (0, 1, 19), (0, 0, 19)),
        ("setpriority", (2, 0, 19), (0, 0, 5)),
        ("prctl", (4, 0), (15, 0)),
        ("fcntl", (3, 1031, 1 << 20), (3, 1032)),
        ("setsockopt", (3, 1, 7), (3, 1, 2)),
        ("setsockopt", (3, 1, 33), (3, 6, 7)),
        *((name, (1,), (0,)) for name in OWN),
    ],
)
def test_arguments_decide(
    machine: str, name: str, refused: tuple[int, ...], allowed: tuple[int, ...]
) -> None:
    code, (column, arch) = bpf_filter(machine), MACHINES[machine]
    assert code is not None
    nr = (SPECIAL | OWN)[name][column]
    assert verdict_of(code, arch, nr, *refused) == 0x50000 | (97 if name == "socketpair" else 1)
    assert verdict_of(code, arch, nr, *allowed) == ALLOW


def test_the_numbers_are_those_of_the_kernel() -> None:
    """For the machine this runs on, from the headers that its compiler uses."""
    if platform.machine() not in MACHINES or shutil.which("gcc") is None:
        pytest.skip("no compiler, or a machine that the filter does not know")
    said = subprocess.run(
        ["gcc", "-E", "-dM", "-"], input="#include <asm/unistd.h>", capture_output=True, text=True
    ).stdout
    numbers = dict(re.findall(r"#define __NR(?:3264)?_(\w+) (\d+)$", said, re.MULTILINE))
    column = MACHINES[platform.machine()][0]
    if "ptrace" not in numbers:
        pytest.skip("no headers of the kernel")
    listed = {name: pair[column] for name, pair in (DENIED | QUIET | OWN | SPECIAL).items()}
    wrong = {
        name: (mine, numbers.get(name))
        for name, mine in listed.items()
        if name in numbers and str(mine) != numbers[name]
    }
    absent = {name for name, mine in listed.items() if mine is not None and name not in numbers}
    # newer than some headers, and defined only where a flag is set
    assert not wrong and absent <= {"memfd_secret"}


# -- plain values

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=8)
)
keys = st.recursive(scalars, lambda c: st.tuples(c, c), max_leaves=4)
values = st.recursive(
    scalars,
    lambda c: (
        st.lists(c, max_size=3)
        | st.tuples(c, c)
        | st.dictionaries(keys, c, max_size=3)
        | st.sets(keys, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(values)
def test_plain_values_survive_the_way(value: Any) -> None:
    back = decode(loads(dumps({"v": encode(value)}))["v"])
    assert back == value and repr(type(back)) == repr(type(value))
    assert same_value(back, value)


def test_what_is_not_plain_does_not_cross() -> None:
    class Liar(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    back = decode(encode([Liar(3), object(), 1 << 20_000, math.inf, range(3), {1, 2}]))
    assert (
        type(back[0]) is int
        and back[0] == 3
        and isinstance(back[1], Opaque)
        and back[1] != back[1].kind
    )
    assert back[2:4] == [1 << 20_000, math.inf] and list(back[4]) == [0, 1, 2] and back[5] == {1, 2}
    assert isinstance(decode(encode(set(range(KEYS + 1)))), Opaque)
    deep: list[Any] = []
    for _ in range(500):
        deep = [deep]
    with pytest.raises(ValueError, match="deep"):
        encode(deep)
    for bad in (
        '{"t":"set","v":[[1]]}',
        '{"t":"code","v":[]}',
        '{"t":"int","v":5}',
        '{"a":1}',
        '{"t":"dict","v":[[1]]}',
        '{"t":"complex","v":[]}',
    ):
        with pytest.raises(ValueError):
            decode(json.loads(bad))
    with pytest.raises(ValueError):
        loads(b"[" * 100_000)
    with pytest.raises(ValueError, match="collide"):
        decode({"t": "set", "v": [i * (2**61 - 1) for i in range(40_000)]})
    assert len(decode({"t": "dict", "v": [[i, 0] for i in range(40_000)]})) == 40_000


def test_comparing() -> None:
    assert (
        same_output(b"1 2 \n3\n\n", "1 2\n3")
        and not same_output(b"1 2\n3", "1 2 3")
        and not same_output(b"", "0")
    )
    assert (
        same_output(b"0.3333\nyes", "0.33333\nyes", 1e-3)
        and not same_output(b"0.3333", "0.33333")
        and not same_output(b"nan", "1", 0.1)
    )
    assert (
        same_value((1, [2.0]), [1, [2]])
        and same_value({1: "a"}, {"1": "a"})
        and same_value(math.nan, math.nan)
    )
    assert (
        not same_value([1, 2], [1])
        and not same_value("1", 1)
        and not same_value({1: 2}, {"1": 3})
        and not same_value({1}, [1])
    )
    assert (
        same_value(0.1 + 0.2, 0.3, 1e-9)
        and not same_value(0.1 + 0.2, 0.3)
        and not same_value(10**400, 1.0, 0.1)
    )


# -- judging


def test_asserts_that_need_more_than_a_call(isolation: Isolation) -> None:
    code = """
def sort(x): x.sort()
def fail(n): raise ValueError(f"no {n}")
def mine(): raise type("Own", (Exception,), {})("x")
def squares(n): return (i * i for i in range(n))
def pair(): return 1, {2: {3}}
"""
    tests = [
        "a = [3, 1]\nsort(a)\nassert a == [1, 3]",
        "try: fail(2)\nexcept ValueError as e: assert str(e) == 'no 2'\nelse: assert False",
        "try: mine()\nexcept Exception as e: assert 'x' in str(e)",
        "assert list(squares(3)) == [0, 1, 4] and pair() == (1, {2: {3}})",
        "import math\nassert math.isclose(sum(squares(4)), 14)",
        "assert squares(3) == [0, 1, 4]",
        "assert undefined_there() == 1",
    ]
    verdict = judge_asserts(isolation, None, code, tests, None, RULES)
    assert (verdict.passed, verdict.total, verdict.status) == (5, 7, "judged"), verdict


SWALLOWS = {
    "StopIteration": "for got, wanted in zip(map(f, [1, 2]), [2, 3]): assert got == wanted",
    "StopIteration in all": "assert all(got == 2 for got in [*map(f, [1])])",
    "StopIteration past a with": (
        "import threading\ndef g(x):\n    with threading.Lock(): return f(x)\nassert all(map(g,"
        " [1]))"
    ),
    "StopIteration past an except": (
        "def g(x):\n    try: return f(x)\n    except Exception: raise\nassert all(map(g, [1]))"
    ),
    "StopIteration past a finally": (
        "def g(x):\n    try: return f(x)\n    finally: pass\nassert all(map(g, [1]))"
    ),
    "IndexError": (
        "class Items:\n    def __getitem__(self, i): return f(i)\nassert all(got == 1 for got in"
        " Items())"
    ),
    "AttributeError": (
        "class Named:\n    @property\n    def name(self): return f(1)\nassert not hasattr(Named(),"
        " 'name')"
    ),
    "AttributeError with a default": (
        "class Named:\n    @property\n    def name(self): return f(1)\nassert getattr(Named(),"
        " 'name', 2) == 2"
    ),
    "KeyError": (
        "from collections.abc import Mapping\nclass Keys(Mapping):\n    __iter__ = __len__ = None\n"
        "    def __getitem__(self, key): return f(key)\nassert Keys().get(1, 2) == 2"
    ),
    "StopAsyncIteration": (
        "import asyncio\nclass Loop:\n    def __aiter__(self): return self\n    async def"
        " __anext__(self): return f(1)\nasync def go():\n    async for got in Loop(): assert got =="
        " 2\nasyncio.run(go())"
    ),
    "ValueError in a thread": (
        "import threading\nt = threading.Thread(target=lambda: f(1))\nt.start()\nt.join()"
    ),
    "ValueError in a future": (
        "from concurrent.futures import ThreadPoolExecutor, wait\n"
        "with ThreadPoolExecutor() as pool: wait([pool.submit(f, 1)])"
    ),
    "ValueError in a task": (
        "import asyncio\nasync def g(): f(1)\n"
        "async def go(): await asyncio.wait([asyncio.create_task(g())])\nasyncio.run(go())"
    ),
    "StopIteration under assertRaises": (
        "import unittest\ndef g():\n    for x in zip(map(f, [1])): pass\n    raise ValueError\n"
        "unittest.TestCase().assertRaises(ValueError, g)"
    ),
    "ValueError that assertWarns lets a thread forget": (
        "import threading, unittest, warnings\ndef g():\n    t = threading.Thread(target=f,"
        " args=[1])\n    t.start()\n    t.join()\n   "
        " warnings.warn('x')\nunittest.TestCase().assertWarns(UserWarning, g)"
    ),
    "ValueError that assertRaises does not expect": (
        "import unittest\nunittest.TestCase().assertRaises(KeyError, lambda: f(1))"
    ),
    "TypeError of a length": (
        "class Sized(list):\n    def __len__(self): return f(1)\nassert list(iter(Sized())) == []"
        " and [*Sized()] == []"
    ),
}


@pytest.mark.parametrize("name", SWALLOWS)
def test_an_exception_that_python_swallows_does_not_pass_a_test(name: str) -> None:
    """The test goes on, or ends early, without having looked at what it wanted to see."""
    here = containment("own")
    verdict = judge_asserts(
        here, None, f"def f(x): raise {name.split()[0]}('no')", [SWALLOWS[name]], None, RULES
    )
    assert (verdict.passed, verdict.status) == (0, "judged"), verdict
    assert "which the test did not handle" in verdict.reason or name.split()[0] in verdict.reason


def test_an_exception_that_the_test_asks_for_passes_it() -> None:
    here = containment("own")
    tests = [
        "try: f(1)\nexcept StopIteration: pass\nelse: assert False",
        "try: f(1)\nexcept Exception as e: assert type(e) is StopIteration and e.value == 'no'",
        "import contextlib\nwith contextlib.suppress(StopIteration): f(1)",
        (
            "import unittest\ncase = unittest.TestCase()\nwith case.assertRaises(StopIteration) as"
            " held: f(1)\nassert held.exception.value == 'no'"
        ),
        "import unittest\nunittest.TestCase().assertRaises(StopIteration, f, 1)",
        "import unittest\nunittest.TestCase().assertRaises(StopIteration, lambda: f(1))",
        (
            "import unittest\nunittest.TestCase().assertRaisesRegex(StopIteration, '^no$', lambda:"
            " [f(1)])"
        ),
        (
            "import unittest\nfrom concurrent.futures import ThreadPoolExecutor as Pool\nwith"
            " Pool() as pool: unittest.TestCase().assertRaises(StopIteration, lambda:"
            " pool.submit(f, 1).result())"
        ),
        (
            "from concurrent.futures import ThreadPoolExecutor as Pool\n"
            "with Pool() as pool: assert isinstance(pool.submit(f, 1).exception(), StopIteration)"
        ),
        (
            "from concurrent.futures import ThreadPoolExecutor as Pool\n"
            "with Pool(8) as pool: held = [pool.submit(f, i) for i in range(40)]\n"
            "assert {type(e) for e in [h.exception() for h in held]} == {StopIteration}"
        ),
        (
            "import asyncio\nasync def g(): f(1)\nasync def go():\n"
            "    got = await asyncio.gather(g(), g(), return_exceptions=True)\n"
            "    assert [type(e.__cause__) for e in got] == [StopIteration] * 2\nasyncio.run(go())"
        ),
        (
            "def g():\n    for _ in range(2):\n        try: f(1)\n        except StopIteration:"
            " return 5\nassert g() == 5"
        ),
        (
            "def g():\n    yield f(1)\ntry: list(g())\nexcept RuntimeError as e: assert"
            " 'StopIteration' in str(e)"
        ),
        (
            "try:\n    try: f(1)\n    except StopIteration as e: raise ValueError('other') from"
            " e\nexcept ValueError: pass"
        ),
        "try: f(1)\nexcept* StopIteration: pass",
        (
            "async def go():\n    async with asyncio.timeout(60):\n        try: f(1)\n       "
            " except StopIteration: return 1\nimport asyncio\nassert asyncio.run(go()) == 1"
        ),
    ]
    verdict = judge_asserts(here, None, "def f(x): raise StopIteration('no')", tests, None, RULES)
    assert (verdict.passed, verdict.total) == (len(tests), len(tests)), verdict


def test_an_exception_that_pytest_is_asked_for_passes_the_test() -> None:
    """If somebody names the folder that pytest is in."""
    folder = os.path.dirname(os.path.dirname(pytest.__file__))
    rules = JudgeRules(Limits(seconds=60, packages=(folder,)), total_seconds=60)
    tests = [
        "import pytest\npytest.raises(ValueError, f, 1)",
        "import pytest\nassert str(pytest.raises(ValueError, lambda: f(1)).value) == 'no'",
        "import pytest\nwith pytest.raises(ValueError, match='no'): f(1)",
        "import pytest\npytest.raises(KeyError, f, 1)",
    ]
    verdict = judge_asserts(
        containment("own"), None, "def f(x): raise ValueError('no')", tests, None, rules
    )
    assert (verdict.passed, verdict.total, verdict.status) == (3, 4, "judged"), verdict


def test_tests_that_cannot_be_used_are_unscored_not_failed(isolation: Isolation) -> None:
    code = "def apply(f, x): return f(x)"
    assert judge_asserts(
        isolation, None, code, ["assert apply(lambda v: v + 1, 1) == 2"], None, RULES
    ).failed_here
    assert judge_asserts(isolation, None, code, ["assert apply("], None, RULES).failed_here
    assert judge_asserts(
        isolation, None, code, ["assert True", "return 5"], None, RULES
    ).failed_here
    caught = "try: apply(lambda v: v + 1, 1)\nexcept BaseException: pass"
    assert judge_asserts(isolation, None, code, [caught], None, RULES).failed_here
    assert (
        judge_beside(
            isolation,
            None,
            code,
            ["assert apply(lambda v: v + 1, 1) == 2", "assert apply(abs, -1) == 2"],
            RULES,
        ).passed
        == 1
    )


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import sys\nprint(4, flush=True)\nsys.exit(3)", "crashed"),
        ("import os\nprint(4, flush=True)\nos.kill(os.getpid(), 11)", "crashed"),
        ("print(4, flush=True)\nwhile True: pass", "timeout"),
        ("print(4, flush=True)\nx = bytes(1 << 40)", "memory"),
    ],
)
def test_the_right_output_before_a_crash_is_not_paid(
    code: str, status: str, isolation: Isolation
) -> None:
    rules = JudgeRules(Limits(seconds=2 if status == "timeout" else 20))
    verdict = judge_stdin(isolation, None, Program(code), [("2", "4")], rules)
    assert (verdict.passed, verdict.status) == (0, status), verdict
    assert judge_beside(isolation, None, "pass", [code], rules).passed == 0


@pytest.mark.parametrize("nonce", ["", "0", "' + '0' * 16 + '"])
def test_a_reply_without_the_nonce_of_its_request_is_no_reply(
    nonce: str, isolation: Isolation
) -> None:
    """One line for each call, right in all but the nonce, written past our driver."""
    code = f"""
import os, threading
def f(x):
    os.write(4, ('{{"nonce":"{nonce}","value":' + str(x + 1) + '}}\\n').encode())
    threading.Event().wait()
"""
    verdict = judge_calls(isolation, None, code, "f", [([1], 2), ([2], 3)], RULES)
    assert (verdict.passed, verdict.status) == (0, "crashed"), verdict


def test_a_program_that_speaks_before_it_is_asked_is_ended(isolation: Isolation) -> None:
    """A guess at the next answer, sent with the last one, is not taken for it."""
    code = (
        "import os, time\nos.read(3, 99)\nos.write(4, b'one\\ntwo\\n')\nos.read(3,"
        " 99)\ntime.sleep(60)"
    )
    with Process(
        isolation, [interpreter(), "-I", "-c", code], {}, Limits(seconds=60), channel=True
    ) as process:
        assert process.ask(b"first", 30) == b"one"
        assert process.ask(b"second", 30) is None
        result = process.finish()
    assert (result.status, result.reason) == ("crashed", "wrote to the channel unasked")


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        ("import os\nos._exit(0)", "crashed"),
        ("while True: pass", "timeout"),
        ("import a_package_that_nobody_has", "judged"),
        ("assert 1 == 2", "judged"),
    ],
)
def test_tests_that_end_before_they_ask_are_to_blame_and_not_the_solution(
    ends: str, status: str, isolation: Isolation
) -> None:
    """After they asked it may be the solution's doing: it gave them what they ended on."""
    seconds = 2 if status == "timeout" else 20
    rules = JudgeRules(Limits(seconds=seconds), total_seconds=seconds)
    before = judge_asserts(
        isolation, None, "def f(x): return x", [f"{ends}\nassert f(1) == 1"], None, rules
    )
    after = judge_asserts(
        isolation, None, "def f(x): return x", [f"assert f(1) == 1\n{ends}"], None, rules
    )
    assert before.passed == 0 and before.failed_here, before
    assert (after.passed, after.status) == (0, status), after


def test_methods_and_partial_passes(isolation: Isolation) -> None:
    code = "class Solution:\n    def twice(self, x):\n        return x * 2 if x < 5 else 1 // 0"
    cases: list[Any] = [([1], 2), ([9], 18), ([2], 4)]
    assert judge_calls(isolation, None, code, "twice", cases, RULES).passed == 2
    stopped = judge_calls(
        isolation, None, code, "Solution.twice", cases, JudgeRules(Limits(), stop_at_failure=True)
    )
    assert stopped.passed == 1 and stopped.reason.startswith("ZeroDivisionError")
    late = judge_calls(
        isolation,
        None,
        "import time\ndef f(x): time.sleep(x); return x",
        "f",
        [([0], 0), ([9], 9), ([0], 0)],
        JudgeRules(Limits(seconds=0.6)),
    )
    assert (late.passed, late.status) == (1, "timeout")
    several = judge_stdin(
        isolation,
        None,
        Program("x = int(input())\nprint(x if x else 1 / 0)"),
        [("1", "1"), ("0", "0"), ("3", "3")],
        RULES,
    )
    assert (several.passed, several.total, several.status) == (2, 3, "crashed")


# -- a remote sandbox


@pytest.fixture
def service() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Speaks SandboxFusion's protocol, and contains as well as we do."""
    here = containment("own")
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body | {"path": self.path})
            if body["code"] == "overloaded":
                self.send_error(503)
                return
            result = run_sync(
                Program(body["code"], body["language"], body["stdin"]),
                Limits(seconds=body["run_timeout"]),
                here,
            )
            status = {"timeout": "TimeLimitExceeded"}.get(result.status, "Finished")
            run_result = {
                "status": status,
                "execution_time": result.seconds,
                "return_code": result.exit_code,
                "stdout": result.stdout.decode(),
                "stderr": "",
            }
            broken = body["code"] == "broken"
            said = {
                "status": (
                    "SandboxError" if broken else "Success" if result.status == "ok" else "Failed"
                ),
                "message": "oh",
                "run_result": run_result,
            }
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(said).encode())

        def log_message(self, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_remote_sandbox(service: tuple[str, list[dict[str, Any]]]) -> None:
    url, asked = service
    there = Isolation("remote", url)
    result = run_sync(Program("print(input())", stdin="hello"), Limits(seconds=5), there)
    assert (result.status, result.stdout) == ("ok", b"hello\n")
    assert (
        asked[0]["path"] == "/run_code"
        and asked[0]["run_timeout"] == 5
        and asked[0]["language"] == "python"
    )
    assert run_sync(Program("while True: pass"), Limits(seconds=0.5), there).status == "timeout"
    assert run_sync(Program("import sys; sys.exit(3)"), Limits(), there).exit_code == 3
    for code in ("broken", "overloaded"):
        assert run_sync(Program(code), Limits(), there).failed_here
    assert run_sync(
        Program("print(1)"), Limits(), Isolation("remote", "http://127.0.0.1:9")
    ).failed_here
    honest = "def add(a, b):\n    print('thinking', end='')\n    return (a + b, {'s'})"
    assert (
        judge_calls(
            there, None, honest, "add", [([1, 2], [3, {"s"}]), ([1, 1], [3, {"s"}])], RULES
        ).passed
        == 1
    )
    assert (
        judge_calls(there, None, "import os\nos._exit(0)", "add", [([1, 2], 3)], RULES).passed == 0
    )
    assert (
        judge_stdin(there, None, Program("print(input())"), [("a", "a"), ("b", "c")], RULES).passed
        == 1
    )
