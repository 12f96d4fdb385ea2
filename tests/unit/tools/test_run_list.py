"""tools/run_list.py: commands within their limits, and what is left of them."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from helpers.paths import ROOT

TOOL = ROOT / "tools" / "run_list.py"


def run(folder: Path, text: str, *options: str) -> tuple[int, list[str], str]:
    (folder / "list").write_text(text)
    command = [sys.executable, str(TOOL), str(folder / "list"), "--out", str(folder / "out")]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_what_takes_too_long_is_killed_with_its_children_and_the_next_one_runs(
    tmp_path: Path,
) -> None:
    beat = tmp_path / "beat"
    late = f"echo begun; (while true; do date >> {beat}; sleep 0.05; done) & wait"
    code, said, _ = run(
        tmp_path, f"# a comment\nhangs 1 {late}\n\nbad 5 echo no; exit 3\ngood 5 echo one; echo 7\n"
    )
    assert code == 1
    assert [line.split(" ")[:2] for line in said] == [
        ["hangs:", "late,"],
        ["bad:", "3,"],
        ["good:", "0,"],
    ]
    assert said[0].endswith(": begun") and said[2].endswith(": 7")
    assert (tmp_path / "out" / "good.log").read_text() == "one\n7\n"
    size = beat.stat().st_size
    time.sleep(0.3)
    assert beat.stat().st_size == size


def test_all_of_them_have_an_end(tmp_path: Path) -> None:
    start = time.monotonic()
    code, said, _ = run(tmp_path, "one 60 sleep 30\ntwo 60 echo\n", "--seconds", "5.5")
    assert time.monotonic() - start < 20
    assert (code, said[0][:9], said[1:]) == (1, "one: late", ["two: not begun"])


def test_a_line_that_is_none_is_named(tmp_path: Path) -> None:
    code, _, error = run(tmp_path, "wide 10 true\nwide python x.py\n")
    assert (code, error) == (1, "line 2 is not NAME LIMIT COMMAND: wide python x.py\n")
    assert not (tmp_path / "out").exists()
