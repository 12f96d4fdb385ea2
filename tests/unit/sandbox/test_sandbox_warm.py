"""Runs that are forked instead of started: contained as the others are, nothing to give away,
nothing left behind.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from leftovers import descriptors

from helpers.sandboxes import containment
from reinforge.rewards.code import CodeReward
from reinforge.sandbox import Limits, Pool, Program, run_sync, zygote
from reinforge.sandbox.isolation import Isolation
from reinforge.sandbox.judge import JudgeRules, judge_asserts, judge_calls
from reinforge.sandbox.process import Process
from reinforge.sandbox.program import Result

LOOK = """
import os, socket
def look(secret):
    status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
    found = {k: status[k].strip() for k in ("CapEff", "CapBnd", "CapPrm", "NoNewPrivs", "Seccomp")}
    try:
        socket.socket()
        found["socket"] = True
    except OSError:
        found["socket"] = False
    try:
        open("/etc/x", "w")
        found["writes"] = True
    except OSError:
        found["writes"] = False
    fds = set()
    for fd in range(1024):
        try:
            os.fstat(fd)
            fds.add(fd)
        except OSError:
            pass
    found |= {"uid": os.getuid(), "fds": sorted(fds),
              "pids": sorted(int(n) for n in os.listdir("/proc") if n.isdigit()),
              "env": sorted(os.environ), "root": sorted(os.listdir("/"))}
    # expected values never come in: this one is of another sample's tests
    needle = ("x" + "yzzy-%d").encode() % (secret + 1)
    held = 0
    for line in open("/proc/self/maps"):
        if " rw-p " in line:
            low, high = (int(n, 16) for n in line.split()[0].split("-"))
            with open("/proc/self/mem", "rb") as memory:
                memory.seek(low)
                try:
                    held += memory.read(high - low).count(needle)
                except OSError:
                    pass
    found["held"] = held
    return found
"""


@pytest.fixture
def pool():  # type: ignore[no-untyped-def]
    containment("own")
    made = Pool(2, backend="namespaces", warm=True)
    yield made
    made.close()


def test_a_forked_run_is_contained_and_knows_nothing(pool: Pool) -> None:
    async def go() -> dict[str, object]:
        # the worker has judged these before: what they expected must not be in the memory of who
        # comes next
        for k in range(3):
            code = "def f(a):\n    return a"
            await pool.call(judge_calls, code, "f", [([f"{k}"], f"xyzzy-{8}")], JudgeRules())
        said: dict[str, object] = {}
        for name, expected in (
            ("CapEff", "0" * 16),
            ("CapBnd", "0" * 16),
            ("CapPrm", "0" * 16),
            ("NoNewPrivs", "1"),
            ("Seccomp", "2"),
            ("socket", False),
            ("writes", False),
            ("uid", 1000),
            ("fds", [0, 1, 2, 3, 4]),
            ("held", 1),
        ):
            code = LOOK + f"\ndef f(secret):\n    return look(secret)[{name!r}]"
            verdict = await pool.call(
                judge_calls, code, "f", [([7], expected)], JudgeRules(Limits(seconds=20))
            )
            said[name] = verdict.passed == 1
        verdict = await pool.call(
            judge_calls,
            LOOK
            + "\ndef f():\n    s = look(7)\n    return len(s['pids']) <= 2 and 'REINFORGE_RUN' in"
            " s['env'] and len(s['env']) <= 9 and 'home' not in s['root'] and 'var' not in"
            " s['root']",
            "f",
            [([], True)],
            JudgeRules(Limits(seconds=20)),
        )
        said["surroundings"] = verdict.passed == 1
        return said

    said = asyncio.run(go())
    assert all(said.values()), said  # "held" is 1: the needle itself, made in the program


def test_every_run_is_a_fresh_one(pool: Pool) -> None:
    code = (
        "import os, builtins\nbuiltins.n = getattr(builtins, 'n', 0) + 1\nopen('/tmp/left',"
        " 'a').write('x')\n"
    )
    code += "def f():\n    return [builtins.n, os.path.getsize('/tmp/left'), os.getpid()]"

    async def go() -> list[int]:
        return [
            (await pool.call(judge_calls, code, "f", [([], [1, 1, 2])], JudgeRules())).passed
            for _ in range(3)
        ]

    assert asyncio.run(go()) == [1, 1, 1]


@pytest.fixture(params=[True, False], ids=["prepared", "sharing nothing"])
def boxes(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[zygote.Zygote]:
    """The launcher of this process, with boxes to look at."""
    containment("own")
    monkeypatch.setattr(zygote, "_enabled", True)
    monkeypatch.setattr(zygote, "_prepares", request.param)
    monkeypatch.setattr(zygote, "_running", None)
    made = zygote.ready()
    assert made is not None and zygote._prepares is request.param
    yield made
    made.close()


def ran(code: str, seconds: float = 5.0) -> Result:
    return run_sync(Program(code), Limits(seconds=seconds, memory_mb=256), Isolation("own"))


LEAVES = """
import os, time
os.makedirs("/tmp/a/b"); open("/tmp/a/b/left", "w").write("marker")
try:
    os.setxattr("/tmp", "user.note", b"marker")
except OSError:
    pass  # this kernel's tmpfs has none
os.chmod("/tmp", 0o777); os.utime("/tmp", (1, 1))
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    for fd in range(3):
        os.close(fd)
    while True:
        time.sleep(0.01)
print("left")
"""
LOOKS = """
import os
print(sorted(os.listdir("/tmp")), oct(os.stat("/tmp").st_mode), os.stat("/tmp").st_mtime > 2,
      os.listxattr("/tmp"), [n for n in os.listdir("/proc") if n.isdigit()],
      len(os.listdir("/proc/self/fd")), os.getpid())
"""


def test_a_box_is_used_again_and_holds_nothing_of_the_run_before(boxes: zygote.Zygote) -> None:
    first = ran(LOOKS).stdout
    assert b"['main.py']" in first and b"True [] ['2']" in first, first
    [box] = boxes._boxes
    leaves = ran(LEAVES)
    assert leaves.status == "ok" and leaves.stdout == b"left\n", leaves
    assert ran(LOOKS).stdout == first and boxes._boxes == [box]
    assert (
        ran("import os\nos.kill(os.getpid(), 11)").status == "crashed"
        and ran(LOOKS).stdout == first
        and boxes._boxes == [box]
    )


def test_a_box_whose_run_was_killed_is_replaced(boxes: zygote.Zygote) -> None:
    ran("pass")
    [box] = boxes._boxes
    before = descriptors()
    for code, status in (
        ("while True: pass", "timeout"),
        ("print('x' * 10**8)", "output"),
        ("x = bytearray(10**9)", "memory"),
    ):
        assert ran(code, seconds=1.0).status == status
        assert ran("print(1)").stdout == b"1\n"
    assert box not in boxes._boxes and len(boxes._boxes) == 1 and descriptors() <= before
    [idle] = boxes._boxes
    os.kill(idle.pid, signal.SIGKILL)  # and so is one that died while nobody looked
    while idle.alive():
        time.sleep(0.01)
    assert ran("print(1)").stdout == b"1\n" and descriptors() <= before


def test_a_box_that_was_struck_is_not_used_again(boxes: zygote.Zygote) -> None:
    """Its last words may be read after the decision to kill it, or before: either way
    it is gone.
    """
    for order in ("strike first", "clean first"):
        process = Process(Isolation("own"), ["/bin/true"], {}, Limits(seconds=5))
        box = process._popen
        steps = [
            process._strike,
            lambda process=process: (
                process._out["report"].extend(b"clean\n"),
                process._heard("report"),
            ),
        ]
        for step in steps if order == "strike first" else steps[::-1]:
            step()
        assert isinstance(box, zygote.WarmLauncher) and not box.idle
        process.close()
        assert box not in boxes._boxes and not box.alive()


def test_the_programs_before_are_not_in_memory(boxes: zygote.Zygote) -> None:
    judge_calls(
        Isolation("own"),
        None,
        "def f():\n    return 'plugh-" + "4711'",
        "f",
        [([], "plugh-4711")],
        JudgeRules(),
    )
    code = (
        LOOK.replace('("x" + "yzzy-%d")', '("p" + "lugh-%d")')
        + "\ndef f():\n    return look(4710)['held']"
    )
    assert (
        judge_calls(
            Isolation("own"), None, code, "f", [([], 1)], JudgeRules(Limits(seconds=20))
        ).passed
        == 1
    )
    assert len(boxes._boxes) == 1


def test_pairs_and_pipes_of_honest_programs_work(boxes: zygote.Zygote) -> None:
    code = """
import asyncio, multiprocessing, resource, socket
async def nothing():
    proc = await asyncio.create_subprocess_exec("/bin/echo", "sub", stdout=asyncio.subprocess.PIPE)
    return (await proc.communicate())[0]
a, b = multiprocessing.Pipe()
a.send([1, 2])
c, d = socket.socketpair()
c.send(b"pair")
resource.setrlimit(resource.RLIMIT_NOFILE, (50, 50))
print(asyncio.run(nothing()), b.recv(), d.recv(9), resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    assert ran(code).stdout == b"b'sub\\n' [1, 2] b'pair' (50, 50)\n"


def test_ends_are_as_without(pool: Pool) -> None:
    async def judged(code: str, seconds: float = 10.0, memory: int = 256) -> str:
        verdict = await pool.call(
            judge_calls, code, "f", [([], 1)], JudgeRules(Limits(seconds=seconds, memory_mb=memory))
        )
        return verdict.status

    async def go() -> None:
        assert await judged("def f():\n    while True: pass", seconds=0.5) == "timeout"
        assert await judged("import os\nos._exit(0)") == "crashed"
        assert await judged("def f():\n    raise SystemExit(0)") == "judged"
        assert await judged("import os\ndef f():\n    os.kill(1, 9)\n    return 1") == "judged"
        assert await judged("import ctypes\nctypes.string_at(0)") == "crashed"
        verdict = await pool.call(
            judge_asserts,
            "def f(x):\n    return x + 1",
            ["assert f(1) == 2", "assert f(1) == 3"],
            "f",
            JudgeRules(),
        )
        assert (verdict.passed, verdict.total) == (1, 2)
        result = await pool.run(Program("print(6 * 7)"))
        assert result.stdout == b"42\n" and result.status == "ok"

    asyncio.run(go())


def test_cancelling_kills_and_a_dead_worker_is_replaced(pool: Pool) -> None:
    async def go() -> None:
        slow = asyncio.ensure_future(
            pool.call(
                judge_calls,
                "import time\ntime.sleep(60)",
                "f",
                [([], 1)],
                JudgeRules(Limits(seconds=60)),
            )
        )
        await asyncio.sleep(1.5)
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        code = "def f():\n    return 1"
        assert (await pool.call(judge_calls, code, "f", [([], 1)], JudgeRules())).passed == 1
        workers = pool._workers
        assert workers is not None
        alive = [worker for worker in workers._all if worker.alive]
        assert alive
        for worker in alive:
            os.kill(worker._popen.pid, signal.SIGKILL)
            worker._popen.wait()
        assert [
            (await pool.call(judge_calls, code, "f", [([], 1)], JudgeRules())).passed
            for _ in range(4)
        ] == [1] * 4

    asyncio.run(go())


def test_closing_leaves_nothing_behind() -> None:
    containment("own")
    before = descriptors()
    reward = CodeReward(entry_point="f", workers=2, backend="namespaces").open()
    assert (
        asyncio.run(
            reward(["def f():\n    return 1", "def f():\n    return 2"] * 4, tests=[[[[], 1]]] * 8)
        ).scores
        == [1.0, 0.0] * 4
    )
    assert reward.counts["judged"] == 8 and reward.pool is not None
    reward.pool.close()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and _ours():
        time.sleep(0.1)
    assert not _ours() and descriptors() <= before


def _ours() -> list[str]:
    """Workers of this process, and launchers of those."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                words = (process / "cmdline").read_bytes()
                parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == os.getpid() and b"reinforge.sandbox.workers" in words:
                found.append(words.decode())
    return found


def test_runs_of_one_launcher_cannot_meet_at_a_name() -> None:
    """They share a network: a socket of a pair, taken apart and given an abstract name, would be
    heard by the one that runs beside it.
    """
    containment("own")
    code = """
import ctypes, socket
a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
b.send(b"pairs still work")
def f():
    calls = ctypes.CDLL(None, use_errno=True)
    name = ctypes.create_string_buffer(b"\\x01\\x00\\x00leak", 7)
    apart = calls.connect(a.fileno(), (ctypes.c_uint16 * 8)(), 16)
    return [a.recv(16).decode(), apart, calls.bind(a.fileno(), name, 7),
            calls.listen(a.fileno(), 1), ctypes.get_errno()]
"""
    pool = Pool(1, backend="namespaces", warm=True)
    try:
        verdict = asyncio.run(
            pool.call(
                judge_calls, code, "f", [([], ["pairs still work", -1, -1, -1, 1])], JudgeRules()
            )
        )
    finally:
        pool.close()
    assert verdict.passed == 1, verdict


def test_a_process_with_many_open_files_still_gets_verdicts() -> None:
    containment("own")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1500:
        pytest.skip(f"at most {hard} open files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1500), hard))
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    reward = CodeReward(entry_point="f", workers=1, backend="namespaces").open()
    try:
        assert asyncio.run(reward(["def f():\n    return 1"], tests=[[[[], 1]]])).scores == [1.0]
    finally:
        for fd in held:
            os.close(fd)
        assert reward.pool is not None
        reward.pool.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
