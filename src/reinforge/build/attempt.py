"""One attempt at a run. On one machine there is one; on Ray another one follows when the actors
that train are lost (build/ray_run.py).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from reinforge.checkpoint.memory_snapshot import MemorySnapshot
from reinforge.loops.run import Run


@dataclass
class Attempt:
    """What whoever starts a run knows about it, and is told about it.

    `train_config` makes it, or `run_on_ray` its own kind. The builders hand its values to the run;
    who carries the run out calls `run_made` and `run_opened`.
    """

    began: float = field(default_factory=time.monotonic)
    memory: MemorySnapshot | None = None  # keeps boundaries beside those on disk
    # errors after which the run is begun again at once: no end to tell of
    passing: tuple[type[BaseException], ...] = ()
    run: Run | None = None  # once it is made

    def run_made(self, run: Run) -> None:
        self.run = run

    def run_opened(self, run: Run) -> None:
        """The run continues or begins: its log is open."""
