"""A server as a child: ready or a readable error, ended as a whole, and gone when its owner is
killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.toys import run
from reinforge.core.errors import InputError
from reinforge.engines.served.http import ServerClient, ServerDown
from reinforge.engines.served.server_process import ServerProcess, free_port

GROUP = (
    "import subprocess, sys, time; p = subprocess.Popen(['sleep', '300']); print('child', p.pid,"
    " flush=True); time.sleep(300)"
)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_for(condition, seconds: float = 10.0) -> bool:  # type: ignore[no-untyped-def]
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def child_of(log: Path) -> int:
    assert wait_for(lambda: "child" in log.read_text())
    return int(log.read_text().split()[1])


def test_stopping_ends_the_whole_group(tmp_path: Path) -> None:
    server = ServerProcess(
        [sys.executable, "-c", GROUP], os.environ, tmp_path / "log", where="engine"
    )
    child = child_of(tmp_path / "log")
    assert server.alive and alive(child)
    server.stop()
    server.stop()
    assert not server.alive and wait_for(lambda: not alive(child))


@pytest.mark.parametrize("with_its_children", [False, True])
def test_nothing_outlives_an_owner_that_is_killed(tmp_path: Path, with_its_children: bool) -> None:
    """Also where all children of the owner are killed with it, as Ray does with its workers'."""
    owner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"""
import os, sys, time
from pathlib import Path
from reinforge.engines.served.server_process import ServerProcess
command, log = [sys.executable, "-c", {GROUP!r}], Path({str(tmp_path / "log")!r})
server = ServerProcess(command, os.environ, log, where="engine")
time.sleep(300)""",
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert wait_for((tmp_path / "log").exists, 60)
    child = child_of(tmp_path / "log")
    children = (
        Path(f"/proc/{owner.pid}/task/{owner.pid}/children").read_text().split()
        if with_its_children
        else []
    )
    os.kill(owner.pid, signal.SIGSTOP)  # it notices nothing
    for pid in [*map(int, children), owner.pid]:
        os.kill(pid, signal.SIGKILL)
    assert wait_for(lambda: not alive(child)), "the server's own child is still there"
    owner.wait()


def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    async def never() -> bool:
        return False

    code = (
        "import sys; print('reading'); raise SystemExit(print('ValueError: no such model',"
        " file=sys.stderr) or 3)"
    )
    log = tmp_path / "log"
    log.write_text("Error of another time\n")
    server = ServerProcess([sys.executable, "-c", code], os.environ, log, where="engine")
    with pytest.raises(InputError, match="status 3") as caught:
        run(server.ready(never, 20))
    assert "no such model" in str(caught.value) and "another time" not in str(caught.value)


def test_a_server_that_is_late_is_ended(tmp_path: Path) -> None:
    async def never() -> bool:
        return False

    server = ServerProcess(
        [sys.executable, "-c", "import time; time.sleep(60)"],
        os.environ,
        tmp_path / "log",
        where="engine",
    )
    with pytest.raises(InputError, match="not ready after 0 s"):
        run(server.ready(never, 0.3))
    assert not server.alive


def test_a_python_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot start"):
        ServerProcess(
            [str(tmp_path / "python")], os.environ, tmp_path / "log", where="engine.python"
        )


def test_http_says_who_is_down() -> None:
    with pytest.raises(ServerDown, match="ConnectError"):
        run(ServerClient(f"http://127.0.0.1:{free_port()}").post("/x"))
