"""Whether this process is one of several that torchrun, or something like it, has started."""

from __future__ import annotations

import os


def launched() -> bool:
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ and "MASTER_ADDR" in os.environ


def rank_here() -> int:
    return int(os.environ["RANK"]) if launched() else 0
