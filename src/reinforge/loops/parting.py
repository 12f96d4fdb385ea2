"""Where two runs part, and why: the first step whose anchors differ, what differs first in it, and
which setting, data, code or machine explains that.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reinforge.loops.config_changes import Changes, allowed, changes, said_of
from reinforge.watch.logs import read_json
from reinforge.watch.past import (
    Anchor,
    Difference,
    configs_backwards,
    difference,
    machine_at,
    read_anchors,
)

# which settings decide what: keys, and sections that end in a dot
SAMPLING = ("model.", "adapter.", "rollout.", "env.", "agent.", "run.seed", "structured.")
LEARNING = ("algorithm.", "train.", "critic.", "model.", "adapter.", "teacher.", "ptx.")
DECIDED_BY = {
    "rows": ("data.", "sampling.", "run.seed", "train.prompts_per_step", "algorithm.max_refills"),
    "tokens": (*SAMPLING, "data.", "algorithm.group_size"),
    "logprobs": SAMPLING,
    "rewards": ("rewards.", "rollout.", "env.", "agent.", "algorithm."),
    "update": LEARNING,
    "weights": LEARNING,
}
MACHINE = ("device", "devices", "machine", "cpu", "threads")


@dataclass(frozen=True)
class DivergencePoint:
    """The first step at which two runs differ. `find_parting` makes it."""

    step: int
    what: Difference
    cause: str  # config, data, code, numerics, outside
    evidence: list[str]

    def __str__(self) -> str:
        return f"step {self.step}: {self.what}"


def find_parting(first: Path, second: Path) -> tuple[int, DivergencePoint | None]:
    """How many steps both have done and recorded, and where they part; None: they do not."""
    ours, theirs = read_anchors(first), read_anchors(second)
    common = sorted(ours.keys() & theirs.keys())
    for step in common:
        what = difference(ours[step], theirs[step])
        if what is not None:
            cause, evidence = _why(first, second, step, what, ours[step], theirs[step])
            return len(common), DivergencePoint(step, what, cause, evidence)
    return len(common), None


def _why(
    first: Path, second: Path, step: int, what: Difference, ours: Anchor, theirs: Anchor
) -> tuple[str, list[str]]:
    """The likeliest cause: a setting that decides this, the data, any other setting, the code, the
    machine, or else what is outside of the run.
    """
    found = _settings(first, second, step)
    deciding = {key: pair for key, pair in found.items() if _decides(key, what.what)}
    if deciding:
        return "config", _said(deciding)
    if ours["cursor"].get("fingerprint") != theirs["cursor"].get("fingerprint"):
        return "data", ["the rows of the data sets differ"]
    if found:
        return "config", _said(found)
    versions = changes(read_json(first / "versions.json"), read_json(second / "versions.json"))
    versions.pop("platform", None)
    machines = (machine_at(first, step), machine_at(second, step))
    if machines[0].get("code") != machines[1].get("code"):
        versions["source of reinforge"] = [machines[0].get("code"), machines[1].get("code")]
    if versions:
        return "code", _said(versions)
    apart = [name for name in MACHINE if machines[0].get(name) != machines[1].get(name)]
    if apart:
        return "numerics", [f"{n}: {machines[0].get(n)} and {machines[1].get(n)}" for n in apart]
    if machines[0].get("device", "cpu") != "cpu":
        return "numerics", ["a GPU adds in no fixed order"]
    return "outside", [
        "configuration, data, versions and machine are the same: something that the run asks"
        " (a reward, an environment, a server, a Python program) answered differently"
    ]


def _settings(first: Path, second: Path, step: int) -> Changes:
    """What differs between the configurations that did the step, and may matter."""
    configs = [
        next(config for after, config in configs_backwards(run) if after < step)
        for run in (first, second)
    ]
    return {
        key: pair
        for key, pair in changes(configs[0], configs[1]).items()
        if key == "train.steps" or not allowed(key, *pair)
    }


def _decides(key: str, what: str) -> bool:
    return any(
        f"{key}.".startswith(one) if one.endswith(".") else key == one for one in DECIDED_BY[what]
    )


def _said(found: dict[str, list[Any]]) -> list[str]:
    return [f"{key}: {said_of(old)} and {said_of(new)}" for key, (old, new) in found.items()]
