"""The run's lock: one owner, named to the second; a dead owner's lock is taken over, a live one's
never.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.paths import SRC
from reinforge.checkpoint import lock
from reinforge.checkpoint.lock import LOCK, RunLock, machine, process_start
from reinforge.core.errors import InputError

HOLD = (
    "import sys, time\nfrom reinforge.checkpoint.lock import RunLock\nwith RunLock(sys.argv[1]):\n "
    "   print('held', flush=True)\n    time.sleep(60)"
)


def quiet(text: str) -> None:
    pass


def hold(run: Path) -> subprocess.Popen:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run)],
        env=os.environ | {"PYTHONPATH": str(SRC)},
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None and child.stdout.readline() == b"held\n"
    return child


def write(run: Path, **changes: object) -> Path:
    record = {
        "pid": os.getpid(),
        "host": "here",
        "machine": machine(),
        "start": process_start(os.getpid()),
        "since": "then",
        "nonce": "other",
    }
    path = run / LOCK
    path.write_text(json.dumps(record | changes))
    return path


def test_owner_is_recorded_and_released(tmp_path: Path) -> None:
    run = tmp_path / "new" / "run"
    with RunLock(run) as owner:
        record = json.loads((run / LOCK).read_text())
        assert (
            record["pid"] == os.getpid()
            and record["start"] == process_start(os.getpid())
            and owner.took_over is None
        )
        owner.check()
        with pytest.raises(InputError, match=f"pid {os.getpid()} on .* since"):
            RunLock(run).__enter__()
        assert json.loads((run / LOCK).read_text()) == record
    assert not (run / LOCK).exists()
    with RunLock(run) as owner:
        assert owner.took_over is None


def test_a_live_process_is_refused_and_a_killed_one_taken_over_even_as_a_zombie(
    tmp_path: Path,
) -> None:
    child = hold(tmp_path)
    try:
        with pytest.raises(InputError, match=f"pid {child.pid}"):
            RunLock(tmp_path).__enter__()
        child.send_signal(signal.SIGSTOP)  # a stopped owner is still the owner
        with pytest.raises(InputError, match=f"pid {child.pid}"):
            RunLock(tmp_path).__enter__()
        child.kill()
        # dies, but stays a zombie until it is waited for
        while process_start(child.pid) is not None:
            time.sleep(0.01)
        notices: list[str] = []
        with RunLock(tmp_path, notice=notices.append) as owner:
            assert owner.took_over is not None and owner.took_over["pid"] == child.pid
            assert len(notices) == 1 and str(child.pid) in notices[0]
    finally:
        child.kill()
        child.wait()


def test_a_reused_pid_is_not_the_owner(tmp_path: Path) -> None:
    write(tmp_path, start="1")
    with RunLock(tmp_path, notice=quiet) as owner:
        assert owner.took_over is not None


def test_another_host_is_judged_by_its_heartbeat(tmp_path: Path) -> None:
    path = write(tmp_path, machine="elsewhere/boot/ns", host="elsewhere", pid=1)
    now = time.time()
    os.utime(path, (now - 100, now - 100))
    with pytest.raises(InputError, match=r"pid 1 on elsewhere since then.*120 s"):
        RunLock(tmp_path).__enter__()
    os.utime(path, (now - 130, now - 130))
    with RunLock(tmp_path, notice=quiet) as owner:
        assert owner.took_over is not None and owner.took_over["host"] == "elsewhere"


def test_a_record_cut_short_by_a_kill_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("")
    with RunLock(tmp_path, notice=quiet) as owner:
        assert owner.took_over == {}


def test_heartbeat_refreshes_and_notices_the_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "HEARTBEAT_SECONDS", 0.02)
    with RunLock(tmp_path) as owner:
        os.utime(tmp_path / LOCK, (1, 1))
        deadline = time.monotonic() + 5
        while (tmp_path / LOCK).stat().st_mtime < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (tmp_path / LOCK).stat().st_mtime > time.time() - 60
        write(tmp_path)  # somebody else
        with pytest.raises(InputError, match="no longer owns"):
            owner.check()
    assert (tmp_path / LOCK).exists(), "the other owner's lock must stay"


def test_a_forked_child_does_not_release_its_parents_lock(tmp_path: Path) -> None:
    owner = RunLock(tmp_path)
    with owner:
        owner._pid = os.getpid() + 1  # as a forked child sees it
        owner.__exit__(None, None, None)
        assert (tmp_path / LOCK).exists()
        owner._pid = os.getpid()
    assert not (tmp_path / LOCK).exists()


RACE = """
import sys, time
from reinforge.checkpoint.lock import RunLock
from reinforge.core.errors import InputError
while time.time() < float(sys.argv[2]): pass
try:
    with RunLock(sys.argv[1]):
        print("won", flush=True)
        sys.stdin.read()
except InputError:
    print("lost", flush=True)
"""


def test_of_racing_takeovers_one_wins(tmp_path: Path) -> None:
    write(tmp_path, start="1")
    begin = str(time.time() + 1.5)
    command = [sys.executable, "-c", RACE, str(tmp_path), begin]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    children = [
        subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(SRC)}, **pipes)
        for _ in range(5)
    ]
    # the winner holds on until everyone has tried
    words = [child.stdout.readline().strip() for child in children]
    for child in children:
        child.communicate(timeout=60)
    assert sorted(words) == [b"lost"] * 4 + [b"won"]
