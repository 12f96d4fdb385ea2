"""One contained run: what comes back, which limit ended it, and what is refused. Attacks are in tests/e2e/test_sandbox_attacks.py."""

from __future__ import annotations

import asyncio
import json
import math
import os
import struct
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reinforge.core.errors import InputError
from reinforge.sandbox import Limits, Pool, Program, run, run_sync
from reinforge.sandbox import isolation as isolations
from reinforge.sandbox.isolation import Isolation, choose
from reinforge.sandbox.judge import Rules, judge_asserts, judge_beside, judge_calls, judge_stdin, same_output, same_value
from reinforge.sandbox.plain import KEYS, Opaque, decode, dumps, encode, loads
from reinforge.sandbox.seccomp import ALLOW, DENIED, KILL, MACHINES, SPECIAL, bpf_filter
from sandboxes import WAYS, containment, descriptors, left_behind

RULES = Rules(Limits(seconds=10), total_seconds=20)


@pytest.fixture(scope="module", params=WAYS)
def isolation(request: pytest.FixtureRequest) -> Isolation:
    return containment(request.param)


# -- one run


@pytest.mark.parametrize(("language", "code"), [
    ("python", "print(int(input()) * 2)"), ("bash", "read a; echo $((a * 2))"),
    ("c", '#include <stdio.h>\nint main(){int a;scanf("%d",&a);printf("%d\\n",a*2);}'),
    ("node", "console.log(Number(require('fs').readFileSync(0,'utf8'))*2)"),
])  # fmt: skip
def test_doubles(language: str, code: str, isolation: Isolation) -> None:
    result = run_sync(Program(code, language, "21\n"), Limits(), isolation)
    if "not installed" in result.reason:
        pytest.skip(result.reason)
    assert (result.status, result.exit_code, result.signal, result.stdout, result.unsafe) == ("ok", 0, None, b"42\n", False), result
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
    result = run_sync(Program("(sleep 30; echo late) & sleep 30", "bash"), Limits(seconds=0.5), isolation)
    assert result.status == "timeout" and 0.5 <= result.seconds < 1.5 and time.monotonic() - start < 10


def test_output_is_cut_where_the_cap_is(isolation: Isolation) -> None:
    result = run_sync(Program("import sys\nprint('e' * 10, file=sys.stderr)\nwhile True: print('x' * 99)"), Limits(output_kb=8), isolation)
    assert result.status == "output" and len(result.stdout) == 8192 and result.stdout[:100] == b"x" * 99 + b"\n"


def test_a_large_stdin_arrives_and_one_that_is_not_read_does_no_harm(isolation: Isolation) -> None:
    text = b"0123456789" * 100_000
    assert run_sync(Program("import sys; print(len(sys.stdin.read()))", stdin=text), Limits(), isolation).stdout == b"1000000\n"
    assert run_sync(Program("print('no')", stdin=text), Limits(), isolation).stdout == b"no\n"


def test_files_beside_the_program(isolation: Isolation) -> None:
    program = Program("print(open('data/a.txt').read(), open('b').read())", files={"data/a.txt": "one", "b": b"two"})
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
    assert run_sync(Program("open('/packages/0/x', 'w')"), Limits(packages=(folder,)), isolation).status == "crashed"
    assert (
        judge_calls(isolation, None, "import mine\ndef f(): return mine.value", "f", [([], 5)], Rules(Limits(packages=(folder,)))).passed
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
        results = await asyncio.gather(*[pool.run(Program("import time; time.sleep(0.4); print(1)")) for _ in range(6)])
        assert [r.stdout for r in results] == [b"1\n"] * 6 and time.monotonic() - start >= 0.8  # two rounds of three
        task = asyncio.ensure_future(pool.run(Program("import time; time.sleep(60)"), Limits(seconds=60)))
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(pool.close)

    asyncio.run(many())
    assert left_behind() == [] and descriptors() == before


def test_where_nothing_contains_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolations, "missing", lambda mode: "unshare: Operation not permitted")
    with pytest.raises(InputError, match=r"cannot be contained here \(bubblewrap: unshare.*allow_unsafe: true"):
        choose()
    result = asyncio.run(run(Program("print('ran')")))
    assert result.status == "refused" and result.stdout == b"" and result.failed_here and "unshare" in result.reason
    bare = choose(allow_unsafe=True)
    assert bare.unsafe
    result = run_sync(Program("import os; print(os.getcwd())"), Limits(), bare)
    assert result.status == "ok" and result.unsafe
    assert not os.path.exists(result.stdout.decode().strip())  # its folder is gone
    start = time.monotonic()
    late = run_sync(Program("sleep 30 & sleep 30", "bash"), Limits(seconds=0.3), bare)
    assert late.status == "timeout" and late.unsafe and time.monotonic() - start < 8
    assert left_behind() == []


def test_a_missing_primitive_is_named(isolation: Isolation, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher fails at the first thing that it cannot do, says which, and starts nothing."""
    layout = isolations.layout
    monkeypatch.setattr(isolations, "layout", lambda packages=(): (layout()[0] + (("/no/such/folder", "/no/such/folder"),), layout()[1]))
    result = run_sync(Program("print('ran')"), Limits(), isolation)
    assert result.status == "refused" and result.failed_here and result.stdout == b"" and "/no/such/folder" in result.reason
    monkeypatch.undo()
    monkeypatch.setattr(isolations, "bpf_filter", lambda: None)
    assert isolations.missing.__wrapped__("own") == f"no system call filter for {os.uname().machine} (seccomp)"


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
        else:
            hit = {0x15: value == k, 0x35: value >= k, 0x45: bool(value & k)}[op]
            at += 1 + (true if hit else false)


@pytest.mark.parametrize("machine", MACHINES)
def test_the_filter_refuses_what_it_lists_and_nothing_else(machine: str) -> None:
    code = bpf_filter(machine)
    assert code is not None and bpf_filter("pdp11") is None
    column, arch = MACHINES[machine]
    denied = {numbers[column] for numbers in DENIED.values()} | {SPECIAL["clone3"][column], SPECIAL["socket"][column]}
    for nr in range(600):
        assert (verdict_of(code, arch, nr) != ALLOW) == (nr in denied or nr == SPECIAL["socketpair"][column]), nr
    clone, pair, ioctl = (SPECIAL[n][column] for n in ("clone", "socketpair", "ioctl"))
    assert verdict_of(code, arch, clone, 0x10000011) == 0x50001 and verdict_of(code, arch, clone, 0x3D0F00) == ALLOW
    assert verdict_of(code, arch, pair, 1) == ALLOW and verdict_of(code, arch, pair, 16) == 0x50000 | 97
    assert verdict_of(code, arch, ioctl, 0, 0x5412) == 0x50001 and verdict_of(code, arch, ioctl, 0, 0x5401) == ALLOW
    assert verdict_of(code, 0x40000003, 20) == KILL  # 32-bit calls


# -- plain values

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8) | st.binary(max_size=8)
keys = st.recursive(scalars, lambda c: st.tuples(c, c), max_leaves=4)
values = st.recursive(
    scalars,
    lambda c: st.lists(c, max_size=3) | st.tuples(c, c) | st.dictionaries(keys, c, max_size=3) | st.sets(keys, max_size=3),
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
    assert type(back[0]) is int and back[0] == 3 and isinstance(back[1], Opaque) and back[1] != back[1].kind
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
    assert same_output(b"1 2 \n3\n\n", "1 2\n3") and not same_output(b"1 2\n3", "1 2 3") and not same_output(b"", "0")
    assert same_output(b"0.3333\nyes", "0.33333\nyes", 1e-3) and not same_output(b"0.3333", "0.33333") and not same_output(b"nan", "1", 0.1)
    assert same_value((1, [2.0]), [1, [2]]) and same_value({1: "a"}, {"1": "a"}) and same_value(math.nan, math.nan)
    assert not same_value([1, 2], [1]) and not same_value("1", 1) and not same_value({1: 2}, {"1": 3}) and not same_value({1}, [1])
    assert same_value(0.1 + 0.2, 0.3, 1e-9) and not same_value(0.1 + 0.2, 0.3) and not same_value(10**400, 1.0, 0.1)


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


def test_tests_that_cannot_be_used_are_unscored_not_failed(isolation: Isolation) -> None:
    code = "def apply(f, x): return f(x)"
    assert judge_asserts(isolation, None, code, ["assert apply(lambda v: v + 1, 1) == 2"], None, RULES).failed_here
    assert judge_asserts(isolation, None, code, ["assert apply("], None, RULES).failed_here
    assert judge_beside(isolation, None, code, ["assert apply(lambda v: v + 1, 1) == 2", "assert apply(abs, -1) == 2"], RULES).passed == 1


def test_methods_and_partial_passes(isolation: Isolation) -> None:
    code = "class Solution:\n    def twice(self, x):\n        return x * 2 if x < 5 else 1 // 0"
    cases: list[Any] = [([1], 2), ([9], 18), ([2], 4)]
    assert judge_calls(isolation, None, code, "twice", cases, RULES).passed == 2
    stopped = judge_calls(isolation, None, code, "Solution.twice", cases, Rules(Limits(), stop_at_failure=True))
    assert stopped.passed == 1 and stopped.reason.startswith("ZeroDivisionError")
    late = judge_calls(
        isolation, None, "import time\ndef f(x): time.sleep(x); return x", "f", [([0], 0), ([9], 9), ([0], 0)], Rules(Limits(seconds=0.6))
    )
    assert (late.passed, late.status) == (1, "timeout")
    several = judge_stdin(
        isolation, None, Program("x = int(input())\nprint(x if x else 1 / 0)"), [("1", "1"), ("0", "0"), ("3", "3")], RULES
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
            result = run_sync(Program(body["code"], body["language"], body["stdin"]), Limits(seconds=body["run_timeout"]), here)
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
                "status": "SandboxError" if broken else "Success" if result.status == "ok" else "Failed",
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
    assert asked[0]["path"] == "/run_code" and asked[0]["run_timeout"] == 5 and asked[0]["language"] == "python"
    assert run_sync(Program("while True: pass"), Limits(seconds=0.5), there).status == "timeout"
    assert run_sync(Program("import sys; sys.exit(3)"), Limits(), there).exit_code == 3
    for code in ("broken", "overloaded"):
        assert run_sync(Program(code), Limits(), there).failed_here
    assert run_sync(Program("print(1)"), Limits(), Isolation("remote", "http://127.0.0.1:9")).failed_here
    honest = "def add(a, b):\n    print('thinking', end='')\n    return (a + b, {'s'})"
    assert judge_calls(there, None, honest, "add", [([1, 2], [3, {"s"}]), ([1, 1], [3, {"s"}])], RULES).passed == 1
    assert judge_calls(there, None, "import os\nos._exit(0)", "add", [([1, 2], 3)], RULES).passed == 0
    assert judge_stdin(there, None, Program("print(input())"), [("a", "a"), ("b", "c")], RULES).passed == 1
