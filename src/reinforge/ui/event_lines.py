"""The events of a run as people read them: a sentence each, and what happens again and again once.

`run_pages` shows them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from reinforge.watch.columns import number
from reinforge.watch.runs import BEGINNINGS, ENDINGS

# what is said of events that tell nothing but their step
KNOWN = {
    "empty_step": "no answer taught anything: the gradient was exactly 0",
    "skipped_step": "the gradient was not finite, and the weights stayed as they were",
    "step_skipped_by_caller": "the program that trains left it out",
}
OWN = ("time", "kind", "step")  # these have columns of their own


def event_lines(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One line for each event, oldest first. Repeats in one part of the run are one line, at the
    place of the first, as the last one told it: how many they are, and the step of the last.
    """
    found: list[dict[str, Any]] = []
    places: dict[tuple[str, str], dict[str, Any]] = {}
    for event in events:
        line = _line(event)
        if line["kind"] in BEGINNINGS:
            places = {}
        name = _repeats_as(line["kind"], event)
        before = None if name is None else places.get(name)
        if before is not None:
            before["count"] += 1
            before["text"] = line["text"]
            before["until"] = line["step"] if line["step"] is not None else before["until"]
            continue
        if name is not None:
            places[name] = line
        found.append(line)
    return found


def _repeats_as(kind: str, event: Mapping[str, Any]) -> tuple[str, str] | None:
    """What two events are the same by; None where each is one of its own."""
    if kind in KNOWN:
        return kind, ""
    return (kind, str(event.get("trouble"))) if kind == "trouble" else None


def _line(event: Mapping[str, Any]) -> dict[str, Any]:
    step = event.get("step")
    kind = str(event.get("kind"))
    return {
        "time": number(event.get("time")),
        "step": step if isinstance(step, int) else None,
        "until": step if isinstance(step, int) else None,
        "count": 1,
        "kind": kind,
        "text": _told(kind, event),
    }


def _told(kind: str, event: Mapping[str, Any]) -> str:
    """
    >>> _told("trouble", {"what": "Nothing moves.", "because": "constant_reward"})
    'Nothing moves. Follows from constant reward.'
    >>> _told("config_changed", {"changes": {"train.steps": [10, 20]}})
    'train.steps was 10 and is 20'
    >>> _told("fault", {"role": "reward", "seconds": 1.50000001, "error": None})
    'role: reward, seconds: 1.5'
    """
    if kind in KNOWN:
        return KNOWN[kind]
    if kind == "trouble" and isinstance(event.get("what"), str):
        # what to try stands at the finding: what it was then may not be what it is now
        cause = event.get("because")
        follows = f" Follows from {str(cause).replace('_', ' ')}." if cause else ""
        return f"{event['what']}{follows}"
    if kind in BEGINNINGS:
        steps = event.get("steps")
        return f"{steps} steps to do" if isinstance(steps, int) else ""
    if kind in ENDINGS:
        return str(event.get("stopped") or event.get("reason") or event.get("error") or "")
    if kind == "checkpoint" and isinstance(event.get("path"), str):
        return str(event["path"])
    changes = event.get("changes")
    if kind == "config_changed" and isinstance(changes, Mapping):
        return ", ".join(
            f"{key} was {_written(pair[0])} and is {_written(pair[1])}"
            for key, pair in changes.items()
            if isinstance(pair, list | tuple) and len(pair) == 2
        )
    told = {k: v for k, v in event.items() if k not in OWN and v is not None}
    return ", ".join(f"{k.replace('_', ' ')}: {_written(v)}" for k, v in told.items())


def _written(value: Any) -> str:
    """
    >>> _written(0.0029999999999999996), _written(["a", 1]), _written({"a": 1})
    ('0.003', 'a, 1', '{"a": 1}')
    """
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(_written(one) for one in value)
    return json.dumps(value)
