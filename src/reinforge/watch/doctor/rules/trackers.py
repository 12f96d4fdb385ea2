"""Trackers that failed."""

from __future__ import annotations

from reinforge.watch.doctor.history import RunHistory
from reinforge.watch.doctor.trouble import Trouble
from reinforge.watch.transcripts import cut

WHY = 300  # characters of a reason


def tracker(history: RunHistory) -> list[Trouble]:
    # threads add to them
    return [
        Trouble(
            "tracker",
            f"{name} takes no metrics any more: {cut(error, WHY)}",
            "The run goes on, and metrics.jsonl has all of them.",
        )
        for name, error in list(history.trackers.items())
    ]
