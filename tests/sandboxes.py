"""What the tests of the sandbox share: the ways of containment that work here, and what a run may have left behind."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Literal

import pytest

import needs
from reinforge.sandbox.isolation import Isolation, missing

WAYS: tuple[Literal["own", "bwrap"], ...] = ("own", "bwrap")


def containment(mode: Literal["own", "bwrap"]) -> Isolation:
    """Skips, with the reason, where this machine cannot; fails where it visibly can and we do not."""
    reason = missing(mode)
    if reason is None:
        return Isolation(mode)
    if mode == "own" and os.getuid() == 0 and os.system("unshare -Urnpimf --mount-proc true 2>/dev/null") == 0:
        pytest.fail(f"unshare(1) makes namespaces here, and we do not: {reason}")
    if mode == "bwrap" and shutil.which("bwrap") and os.system("bwrap --unshare-all --ro-bind / / true 2>/dev/null") == 0:
        pytest.fail(f"bubblewrap works here, and we do not make it: {reason}")
    needs.missing("sandbox", f"cannot contain programs by {mode}: {reason}")


def left_behind(run: int | None = None) -> list[str]:
    """Processes that carry the mark of a run (this process), and children of this process that are launchers, dead or alive."""
    mark, found = f"REINFORGE_RUN={run or os.getpid()}\0".encode(), []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                stat = (process / "stat").read_text()
                ours = int(stat.rpartition(")")[2].split()[1]) == os.getpid() and any(n in stat for n in ("(python", "(bwrap"))
                if mark in (process / "environ").read_bytes() or (ours and b"launcher.py" in (process / "cmdline").read_bytes()):
                    found.append(stat[:60])
            except OSError:
                continue
    return found


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
