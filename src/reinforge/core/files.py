"""Files that a run writes for people have the mode that any other program's would have."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Lock

_asking = Lock()


def readable_as_usual(*paths: str | Path) -> None:
    """Gives each file the mode that `open` would have given it. safetensors makes files that only
    their owner can read, whatever the umask says: a colleague, or a server under another user,
    could not load an exported model.
    """
    for path in paths:
        os.chmod(path, 0o666 & ~umask())


def umask() -> int:
    """This process's umask. Linux tells it; elsewhere one can only set it and set it back."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            return next(int(line.split()[1], 8) for line in status if line.startswith("Umask:"))
    except (OSError, StopIteration):
        with _asking:
            os.umask(found := os.umask(0o077))
        return found
