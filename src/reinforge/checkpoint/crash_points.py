"""Named points where a test can kill the process, so that crash safety is shown and not argued."""

from __future__ import annotations

import os
import signal
from collections import Counter

_passed: Counter[str] = Counter()


def crash_point(name: str) -> None:
    """Dies by SIGKILL if REINFORGE_CRASH_AT names this point: `save:before-rename`, or
    `save:before-rename@3` for the third passage.
    """
    wanted = os.environ.get("REINFORGE_CRASH_AT")
    if not wanted:
        return
    _passed[name] += 1
    point, _, count = wanted.partition("@")
    if point == name and _passed[name] == int(count or 1):
        os.kill(os.getpid(), signal.SIGKILL)
