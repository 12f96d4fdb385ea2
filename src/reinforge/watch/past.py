"""The past of a run as its directory tells it: its anchors, the machines it began on, the
configurations it had, and where two runs part.

Reads files only. `loops/anchors.py` says what an anchor is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from reinforge.watch.logs import read_json, read_lines
from reinforge.watch.recorder import ANCHORS

Anchor = dict[str, Any]
LINEAGE = "lineage.json"  # of a branch: the runs that it comes from, the oldest first
# what a sample's digests are of, in the order in which they come about
OF_SAMPLE = ("tokens", "logprobs", "rewards")


def read_anchors(run_dir: Path) -> dict[int, Anchor]:
    """By step, from 1."""
    lines = read_lines(run_dir / ANCHORS)
    return {line["step"]: line for line in lines if "update" in line}


def beginnings(run_dir: Path) -> list[Anchor]:
    """Where the run was begun or continued, in order: its place and its machine."""
    return [line for line in read_lines(run_dir / ANCHORS) if "begins" in line]


def machine_at(run_dir: Path, step: int) -> Mapping[str, Any]:
    """The machine that did a step; nothing where it is not recorded."""
    found = [line["begins"] for line in beginnings(run_dir) if line["step"] < step]
    return found[-1] if found else {}


@dataclass(frozen=True)
class Difference:
    """The first thing in which two anchors of one step differ. `difference` finds it."""

    what: str  # rows, tokens, logprobs, rewards, update, weights
    group: str = ""
    sample: int | None = None  # its number in the group

    def __str__(self) -> str:
        if not self.group:
            return SAID[self.what]
        sample = "" if self.sample is None else f", sample {self.sample}"
        return f"{SAID[self.what]} (group {self.group}{sample})"


SAID = {
    "rows": "other rows are trained",
    "tokens": "other tokens",
    "logprobs": "the same tokens with other log-probs",
    "rewards": "the same answers with other rewards",
    "update": "the same samples with another gradient",
    "weights": "the same gradient norm with other weights",
}


def difference(ours: Anchor, theirs: Anchor) -> Difference | None:
    """In the order in which a step computes; None where all digests are equal."""
    samples = (ours["samples"], theirs["samples"])
    for one, other in zip_longest(*samples):
        if one != other:
            return Difference("rows", one or other)
    for i, what in enumerate(OF_SAMPLE):
        for group in samples[0]:
            pairs = zip_longest(samples[0][group], samples[1][group], fillvalue="- - -")
            for number, (one, other) in enumerate(pairs):
                if one.split()[i] != other.split()[i]:
                    return Difference(what, group, number)
    for what in ("update", "weights"):
        if ours[what] != theirs[what]:
            return Difference(what)
    return None


def seconds_of_steps(run_dir: Path, begin: int, step: int) -> float | None:
    """What the steps took, without evaluations and checkpoints."""
    found = {
        line["step"]: line["time/step"] - line.get("time/eval", 0) - line.get("time/checkpoint", 0)
        for line in read_lines(run_dir / "metrics.jsonl")
        if line.get("time/step") is not None and begin < line["step"] <= step
    }
    return sum(found.values()) if len(found) == step - begin else None


# ---- the configurations of a run ----


def configs_backwards(run_dir: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(n, the configuration that steps after n were done with), the newest first. The last n is 0.

    A run that was continued with other settings has recorded the change; a branch has the
    configuration of the run that it comes from.
    """
    config = json.loads(json.dumps(read_json(run_dir / "config.json")))
    events = read_lines(run_dir / "events.jsonl")
    marks: list[tuple[int, int, Mapping[str, Any]]] = [
        (event["step"], 0, event["changes"])
        for event in events
        if event.get("kind") == "config_changed"
    ]
    marks += [(branch["step"], 1, branch["config"]) for branch in lineage(run_dir)]
    for step, kind, told in sorted(marks, key=lambda mark: mark[:2], reverse=True):
        yield step, config
        config = json.loads(json.dumps(told if kind == 1 else undone(config, told)))
    yield 0, config


def lineage(run_dir: Path) -> Sequence[Mapping[str, Any]]:
    """The runs that a branch comes from, the oldest first."""
    return read_json(run_dir / LINEAGE).get("parents", [])


def undone(config: dict[str, Any], changes: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """The configuration before these changes ({dotted key: [old, new]}).

    >>> undone({"train": {"steps": 9, "backend": "fsdp"}}, {"train.steps": [5, 9]})
    {'train': {'steps': 5, 'backend': 'fsdp'}}
    """
    for key, (old, _) in changes.items():
        *sections, name = key.split(".")
        inside: Any = config
        for section in sections:
            if isinstance(inside, list):
                inside = inside[int(section)]
            elif inside.get(section) is None:
                inside = inside.setdefault(section, {})
            else:
                inside = inside[section]
        if old is None:
            inside.pop(name, None)
        else:
            inside[name] = old
    return config
