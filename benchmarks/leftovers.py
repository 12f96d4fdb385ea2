"""What a contained run may have left behind: processes and descriptors.

For the tests and for sandbox.py.
"""

from __future__ import annotations

import os
from pathlib import Path


def left_behind(run: int | None = None) -> list[str]:
    """Processes that carry the mark of a run (this process), and children of this process that are
    launchers, dead or alive.
    """
    mark = f"REINFORGE_RUN={run or os.getpid()}\0".encode()
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                stat = (process / "stat").read_text()
                ours = int(stat.rpartition(")")[2].split()[1]) == os.getpid() and any(
                    n in stat for n in ("(python", "(bwrap")
                )
                if mark in (process / "environ").read_bytes() or (
                    ours and b"launcher.py" in (process / "cmdline").read_bytes()
                ):
                    found.append(stat[:60])
            except OSError:
                continue
    return found


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
