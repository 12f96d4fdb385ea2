"""Python's garbage collector, while a run trains.

Torch, transformers and a model are half a million objects. A full collection looks at all of them
and took 0.3 s on an ARM core, in which nothing is started on a GPU. They stay until the run is
over, so the collector is told not to look at what was there when it began.
"""

from __future__ import annotations

import gc

_runs = 0  # that are under way in this process


def set_aside() -> None:
    """A run begins: what is there now is not looked at before the last run is over. What nobody
    needs any more, copies of layers for a trial among it, is collected before.
    """
    global _runs
    _runs += 1
    gc.collect()
    gc.freeze()


def look_again() -> None:
    """A run is over."""
    global _runs
    _runs -= 1
    if not _runs:
        gc.unfreeze()
