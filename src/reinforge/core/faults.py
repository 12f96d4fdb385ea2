"""What goes wrong beside training and does not stop it: scores that are missing, episodes that
failed, programs that ran uncontained.

Each kind is counted where it happens (`Group.faults`), becomes a metric of the step
(`faults/KIND`), and one line of kind `fault` in events.jsonl with the reason of the first. The
report shows them in a table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

PREFIX = "faults/"


class Fault(StrEnum):
    """Kinds of things that went wrong around a sample and did not end the run. Rewards, rollouts
    and environments count them; metrics and events carry these names.
    """

    REWARD_TIMEOUT = "reward_timeout"  # scores that are missing because a reward took too long
    REWARD_CRASH = "reward_crash"  # ... because its process died, or met its limit of memory
    REWARD_ERROR = "reward_error"  # ... because it raised, where the config tolerates that
    SANDBOX_FAILURE = "sandbox_failure"  # programs that the sandbox could not run
    # programs that ran without containment, because allow_unsafe said so
    UNCONTAINED = "uncontained"
    EPISODE_TIMEOUT = "episode_timeout"  # episodes whose environment or agent was late
    EPISODE_ERROR = "episode_error"  # ... raised, crashed, or was not there
    EPISODE_FULL = "episode_full"  # ... had no room left for an answer
    # rows that were begun again because the chat template rewrote history
    TEMPLATE_FORKED = "template_forked"


EPISODE = {
    "timeout": Fault.EPISODE_TIMEOUT,
    "error": Fault.EPISODE_ERROR,
    "length": Fault.EPISODE_FULL,
    "sandbox": Fault.SANDBOX_FAILURE,
}


@dataclass(frozen=True, slots=True)
class FaultEvent:
    """All faults of one kind in one step, as one event of the log. Made by `fault_events` for the
    run.
    """

    fault: str
    step: int
    count: int
    why: str = ""  # what was said about the first, if anything
    during: str = "training"  # or evaluation


class FaultyGroup(Protocol):
    """What this module reads of a `Group`: how often something went wrong, and what was said about
    it.
    """

    @property
    def faults(self) -> Mapping[str, int]: ...

    @property
    def why(self) -> Mapping[str, str]: ...


def fault_metrics(groups: Iterable[FaultyGroup], prefix: str = "") -> dict[str, float]:
    """Counts by kind; what did not happen is absent.

    >>> from types import SimpleNamespace as G
    >>> fault_metrics([G(faults={"reward_crash": 2}), G(faults={}), G(faults={"reward_crash": 1})])
    {'faults/reward_crash': 3.0}
    """
    counts: dict[str, float] = {}
    for group in groups:
        for kind, count in group.faults.items():
            counts[kind] = counts.get(kind, 0.0) + count
    return {f"{prefix}{PREFIX}{kind}": counts[kind] for kind in sorted(counts) if counts[kind]}


def fault_events(
    metrics: Mapping[str, float], step: int, groups: Iterable[FaultyGroup] = (), prefix: str = ""
) -> list[FaultEvent]:
    """The events that these metrics tell of, with what the groups say about the reasons."""
    why: dict[str, str] = {}
    for group in groups:
        why = {**group.why, **why}
    start = prefix + PREFIX
    return [
        FaultEvent(
            kind := name.removeprefix(start),
            step,
            int(count),
            why.get(kind, ""),
            "evaluation" if prefix else "training",
        )
        for name, count in metrics.items()
        if name.startswith(start)
    ]
