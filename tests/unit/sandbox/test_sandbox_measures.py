"""What a run may have and see, beyond what one process is told: memory and processor time of all of
them, and the files of the host.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sandbox_attacks import CONTAINED

from helpers import needs
from helpers.paths import SRC
from helpers.sandboxes import WAYS, containment
from reinforge.core.errors import InputError
from reinforge.sandbox import Limits, Program, launcher, run_sync
from reinforge.sandbox import isolation as isolations
from reinforge.sandbox.isolation import Isolation, layout
from reinforge.sandbox.program import interpreter

GROWS = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        held = bytearray(b"x" * (100 << 20))
        time.sleep(60)
time.sleep(60)
"""
BUSY = """
import os
for _ in range(20):
    if os.fork() == 0:
        break
while True:
    pass
"""


@pytest.fixture(scope="module", params=WAYS)
def isolation(request: pytest.FixtureRequest) -> Isolation:
    return containment(request.param)


def elsewhere(python: str, code: str, *before: str) -> str:
    """What a Python process of its own prints, with our package on its path."""
    said = subprocess.run(
        [*before, python, "-c", code],
        capture_output=True,
        text=True,
        timeout=200,
        env={"PYTHONPATH": str(SRC), "PATH": os.environ["PATH"]},
    )
    assert said.returncode == 0, said.stderr
    return said.stdout


# -- memory and time of all processes


def test_processor_time_is_counted_for_all_processes_together(isolation: Isolation) -> None:
    """No process of these comes near the limit by itself."""
    result = run_sync(Program(BUSY), Limits(seconds=100, cpu_seconds=2), isolation)
    assert (result.status, result.reason) == (
        "timeout",
        "processor time of all its processes",
    ), result
    assert result.greedy


def test_processor_time_of_processes_that_have_ended_stays_counted(isolation: Isolation) -> None:
    """Each is gone after a fraction of the limit; some are waited for, some are not."""
    code = """
import os, signal, time
def burn():
    start = time.process_time()
    while time.process_time() - start < 0.3:
        pass
    os._exit(0)
for ignored in (False, True):
    signal.signal(signal.SIGCHLD, signal.SIG_IGN if ignored else signal.SIG_DFL)
    for _ in range(6):
        if os.fork() == 0:
            burn()
        try:
            os.wait()
        except ChildProcessError:
            pass
print("all done")
"""
    result = run_sync(Program(code), Limits(seconds=100, cpu_seconds=2), isolation)
    assert (result.status, result.reason, result.stdout) == (
        "timeout",
        "processor time of all its processes",
        b"",
    ), result


def test_processor_time_of_a_chain_of_short_processes_is_counted(isolation: Isolation) -> None:
    """Each is an orphan, and gone before anybody looks at it; process 1 waits for all of them."""
    code = """
import os, time
if os.fork():
    time.sleep(90)
for _ in range(1500):
    start = time.process_time()
    while time.process_time() - start < 0.004:
        pass
    if os.fork():
        os._exit(0)
print("all done", flush=True)
os.kill(2, 9)
"""
    result = run_sync(Program(code), Limits(seconds=100, cpu_seconds=2), isolation)
    assert (result.status, result.reason, result.stdout) == (
        "timeout",
        "processor time of all its processes",
        b"",
    ), result


def test_one_process_at_a_time_is_not_greedy(isolation: Isolation) -> None:
    code = "import time\nwhile time.process_time() < 0.8: pass\nprint('done')"
    result = run_sync(Program(code), Limits(seconds=100), isolation)
    assert result.stdout == b"done\n" and not result.greedy and result.cpu_seconds >= 0.8, result


def test_open_files_are_counted_for_all_processes_together(isolation: Isolation) -> None:
    code = (
        "import os, time\nfor _ in range(9):\n    if os.fork() == 0: break\nheld = [os.pipe() for _"
        " in range(90)]\ntime.sleep(60)"
    )
    result = run_sync(Program(code), Limits(seconds=60), isolation)
    assert (result.status, result.reason) == ("memory", "more than 512 open files in all"), result
    code = (
        "import os, time\nfor _ in range(20):\n    if os.fork() == 0: break\nheld = [os.pipe() for"
        " _ in range(8)]\ntime.sleep(1)\nprint(1)"
    )
    assert run_sync(Program(code), Limits(seconds=60), isolation).status == "ok"


def test_processes_that_end_while_they_are_counted_do_not_count_as_full() -> None:
    """One that is ending can no longer be looked at; it was taken for one that forbids it, whose
    table of descriptors may be full.
    """
    code = """
import os, subprocess
from reinforge.sandbox import launcher
launcher.HOST_PROC.append(os.open("/proc", os.O_RDONLY))
if os.getuid() == 0:
    os.setuid(65534)  # as process 1 of a run: root may look at everything
children = [subprocess.Popen(["sleep", "60"]) for _ in range(10)]
meter = launcher.ProcessMeter("/tmp")
meter.look()
print(meter.more_descriptors_than(25), meter.more_descriptors_than(100))
for child in children:
    child.kill()
for child in children:
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
print(meter.more_descriptors_than(0))
"""
    assert elsewhere(sys.executable, code) == "True False\nFalse\n"


@pytest.mark.parametrize(
    ("held", "reason"),
    [
        ("bytearray(b'x' * (200 << 20))", "more than 512 MB in all"),
        ("[os.pipe() for _ in range(90)]", "more than 512 open files in all"),
    ],
)
def test_what_threads_hold_counts_when_the_first_has_ended(
    isolation: Isolation, held: str, reason: str
) -> None:
    """Without its first thread a process shows neither memory nor descriptors under its number."""
    code = f"""
import ctypes, os, threading, time
for _ in range(5):
    if os.fork() == 0:
        break
def hold():
    time.sleep(1)
    held = {held}
    time.sleep(20)
    os._exit(0)
threading.Thread(target=hold).start()
ctypes.CDLL(None).syscall({93 if platform.machine() == "aarch64" else 60}, 0)  # exit, of a thread
"""
    result = run_sync(Program(code), Limits(seconds=60), isolation)
    assert (result.status, result.reason) == ("memory", reason), result


@pytest.mark.parametrize("name", [r"\rRssAnon:", r"RssAnon:"])
def test_a_name_does_not_hide_memory(isolation: Isolation, name: str) -> None:
    """A process chooses its name, which stands in the page that its memory is read from."""
    code = f"""
import ctypes, os, time
for _ in range(5):
    if os.fork() == 0:
        break
ctypes.CDLL(None).prctl(15, b"{name}", 0, 0, 0)
time.sleep(0.5)
held = bytearray(b"x" * (200 << 20))
time.sleep(20)
"""
    result = run_sync(Program(code), Limits(seconds=60), isolation)
    assert (result.status, result.reason) == ("memory", "more than 512 MB in all"), result


def test_programs_share_memory_through_files(isolation: Isolation) -> None:
    """What is refused without a file works with one, which is counted: multiprocessing is built on
    that.
    """
    code = """
import mmap, multiprocessing
from multiprocessing import shared_memory
def add(number, block):
    number.value += 1
    mine = shared_memory.SharedMemory(block)
    mine.buf[0] = 7
if __name__ == "__main__":
    number, block = multiprocessing.Value("i", 1), shared_memory.SharedMemory(create=True, size=100)
    child = multiprocessing.Process(target=add, args=(number, block.name))
    child.start(); child.join()
    with open("file", "w+b") as file:
        file.write(bytes(4096)); file.flush()
        mmap.mmap(file.fileno(), 4096)[0] = 5
    print(number.value, block.buf[0], open("file", "rb").read(1))
    block.close(); block.unlink()
    try:
        mmap.mmap(-1, 4096)
    except PermissionError:
        print("refused")
"""
    result = run_sync(Program(code), Limits(seconds=60), isolation)
    assert result.stdout == b"2 7 b'\\x05'\nrefused\n", result


MASKED = f"""
from reinforge.sandbox import Limits, Program, run_sync, zygote
from reinforge.sandbox.isolation import Isolation
def told(code, **limits):
    result = run_sync(Program(code), Limits(**limits), Isolation("own"))
    said = result.stdout.decode().strip()
    print(result.status, "|", result.reason, "|", said, "|", result.greedy)
for warm in (False, True):
    if warm:
        zygote.enable()
        zygote.ready()
        zygote.share_nothing()
    told("import os; print(os.listdir('/proc'), os.path.exists('/dev/fd/7'))", seconds=60)
    told({GROWS!r}, seconds=60, memory_mb=256)
    told({BUSY!r}, seconds=100, cpu_seconds=2)
"""


def test_memory_is_measured_from_outside_where_proc_is_masked() -> None:
    """As in a container: part of /proc is covered, so no other may be mounted, and the program has
    none.
    """
    containment("own")
    mask = [
        "unshare",
        "-m" if os.getuid() == 0 else "-rm",
        "sh",
        "-c",
        'mount -t tmpfs none /proc/irq && exec "$0" "$@"',
    ]
    if subprocess.run([*mask, "true"], capture_output=True).returncode:
        needs.missing("sandbox", "nothing can be mounted here, not even to mask /proc")
    lines = elsewhere(sys.executable, MASKED, *mask).splitlines()
    bare = "ok |  | [] False | False"
    grows = "memory | more than 256 MB in all |"
    busy = "timeout | processor time of all its processes |"
    assert lines[0::3] == [bare, bare], lines
    assert all(line.startswith(grows) for line in lines[1::3]) and all(
        line.startswith(busy) for line in lines[2::3]
    ), lines


def test_without_any_proc_there_is_no_run() -> None:
    """There would be no limit on memory."""
    masked = launcher.ContainmentFailure("mount /new/proc: Operation not permitted")
    with pytest.raises(
        launcher.ContainmentFailure,
        match="Operation not permitted, and no other /proc to measure memory by",
    ):
        launcher.host_proc(masked)  # which looks where the launcher keeps the old root


# -- files


@pytest.fixture
def elsewhere_than_tmp() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="reinforge-test-") as folder:
        yield Path(folder)


def test_the_interpreter_shows_its_library_and_not_its_home(elsewhere_than_tmp: Path) -> None:
    """A Python in the `bin` of a home, with its library in `lib`: the rest of that home is nobody's
    business.
    """
    for mode in WAYS:
        containment(mode)
    home = elsewhere_than_tmp / "home"
    (home / "bin").mkdir(parents=True)
    (home / "lib").mkdir()
    (home / ".ssh").mkdir()
    for name in (".ssh/id", "token", "lib/notes", "bin/script"):
        (home / name).write_text("plugh-4711")
    python = home / "bin" / Path(interpreter()).name
    shutil.copy(interpreter(), python)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (home / "lib" / version).symlink_to(os.path.dirname(os.__file__))
    code = """
import os, sys, ssl
print(sorted(os.path.relpath(os.path.join(folder, name), HOME)
             for folder, _, names in os.walk(HOME) for name in names
             if "/python" not in os.path.relpath(folder, HOME)))
print(os.path.realpath(sys.executable) == PYTHON, os.listdir(os.path.dirname(HOME)))
""".replace("HOME", repr(str(home))).replace("PYTHON", repr(str(python)))
    told = f"""
from reinforge.sandbox import Limits, Program, run_sync
from reinforge.sandbox.isolation import Isolation
for mode in {WAYS!r}:
    result = run_sync(Program({code!r}), Limits(seconds=60), Isolation(mode))
    print(result.stdout.decode() or result)
"""
    assert elsewhere(str(python), told).split("\n\n") == [
        f"['bin/{python.name}']\nTrue ['home']"
    ] * len(WAYS) + [""]


def test_an_interpreter_that_the_programs_own_folder_would_cover_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(isolations, "interpreter", lambda: "/tmp/python/bin/python3")
    with pytest.raises(InputError, match="/tmp/python/bin/python3 is below /tmp"):
        layout.__wrapped__()


def test_of_the_system_only_programs_and_libraries_are_shown(isolation: Isolation) -> None:
    code = (
        "import os\nprint(sorted(os.listdir('/')), sorted(os.listdir('/usr')),"
        " sorted(os.listdir('/usr/share')))"
    )
    result = run_sync(Program(code), Limits(seconds=60), isolation)
    root, usr, share = (
        set(eval(part + "]")) for part in result.stdout.decode().strip().split("]")[:3]
    )
    placed = [path.split("/") for _, path in (*layout().binds, *layout().links)]
    assert root <= {path[1] for path in placed} | {"dev", "etc", "proc", "tmp", "launcher.py"}
    assert usr == {path[2] for path in placed if path[1] == "usr"}
    assert (
        share
        == {path[3] for path in placed if path[1:3] == ["usr", "share"]}
        <= {"zoneinfo", "nodejs"}
    )
    assert usr <= {"bin", "include", "lib", "lib32", "lib64", "libexec", "libx32", "share", "local"}


def test_a_program_in_usr_local_is_no_escape_if_we_put_it_there(
    isolation: Isolation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in images whose Python or node lives there. What else is there is one."""
    attack = next(
        attack for attack in CONTAINED if attack.name == "what the machine's owner installed"
    )
    known_before = attack.program()
    node = replace(
        layout(),
        binds=(*layout().binds, (os.path.realpath("/bin/sh"), "/usr/local/there/bin/node")),
    )
    monkeypatch.setattr(isolations, "layout", lambda packages=(): node)
    assert (
        run_sync(Program(attack.program()), Limits(seconds=60), isolation).stdout
        == b"held nothing else\n"
    )
    assert run_sync(Program(known_before), Limits(seconds=60), isolation).stdout == b"ESCAPED\n"


def test_packages_of_the_interpreter_are_not_there_unless_named(isolation: Isolation) -> None:
    folders: list[str] = [folder for folder in layout().empty if os.listdir(folder)]
    if not folders:
        pytest.skip("nothing is installed beside this interpreter")
    code = f"import os\nprint([os.listdir(folder) for folder in {folders!r}])"
    assert (
        run_sync(Program(code), Limits(seconds=60), isolation).stdout
        == f"{[[] for _ in folders]}\n".encode()
    )
    named: Any = Limits(seconds=60, packages=(folders[0],))
    assert (
        run_sync(
            Program("import os\nprint(len(os.listdir('/packages/0')))"), named, isolation
        ).stdout
        != b"0\n"
    )
