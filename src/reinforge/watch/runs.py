"""Looking at finished and running runs.

Reads run directories only, and trusts nothing in them to be complete.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

from reinforge.core.errors import InputError
from reinforge.watch.doctor.doctor import Doctor
from reinforge.watch.doctor.trouble import Trouble
from reinforge.watch.evaluation_news import EVALUATED
from reinforge.watch.logs import flatten as flatten
from reinforge.watch.logs import read_json as read_json
from reinforge.watch.logs import read_lines as read_lines
from reinforge.watch.past import lineage

ENDINGS = ("finished", "stopped", "terminated", "failed")
BEGINNINGS = ("started", "resumed")
ALIVE_SECONDS = 60.0  # the owner refreshes run.lock every 10 s
OF_ONE_STEP = ("share/", "time/")  # metrics that say nothing once their step is over
EVALS = (("eval/accuracy", max), ("eval/loss", min))
SUMMARY_KEYS = (
    "model.path",
    "algorithm.name",
    "algorithm.group_size",
    "data.source",
    "adapter.rank",
    "train.steps",
    "train.epochs",
    "train.prompts_per_step",
    "train.learning_rate",
    "train.backend",
    "train.ranks",
    "train.router_replay",
    "train.router_aux_loss",
    "train.router_z_loss",
    "train.router_bias_rate",
    "rollout.engine",
    "rollout.max_new_tokens",
    "rollout.temperature",
    "rollout.staleness",
    "rollout.overlap",
    "run.seed",
)
IF_SET = ("rollout.staleness", "rollout.overlap")  # of those: told where they are not 0 or off
# of those: where the policy samples what it is trained on
SAMPLED = ("response/", "reward/")  # metrics of such a run
SAMPLING_KEYS = (
    "algorithm.group_size",
    "rollout.engine",
    "rollout.max_new_tokens",
    "rollout.temperature",
)
ROUTED = "experts/"  # metrics of a mixture
ROUTER_KEYS = "train.router_"


def _told(last: Mapping[str, Any]) -> list[str]:
    """The settings that say most about a run with these metrics."""
    given = bool(last) and not any(name.startswith(SAMPLED) for name in last)
    mixture = any(name.startswith(ROUTED) for name in last)
    return [
        key
        for key in SUMMARY_KEYS
        if not (given and key in SAMPLING_KEYS) and (mixture or not key.startswith(ROUTER_KEYS))
    ]


def is_run(path: Path) -> bool:
    return (path / "metrics.jsonl").is_file() and (path / "config.json").is_file()


def list_runs(root: Path) -> list[dict[str, Any]]:
    """One line per run under `root` (itself included), the most recently written first."""
    found = [
        headline(path, show_run(path), flatten(read_json(path / "config.json")))
        for path in find_runs(root)
    ]
    return sorted(found, key=lambda run: -run["updated"])


def find_runs(root: Path) -> Iterator[Path]:
    """The run directories under `root`, itself included. Links are not followed."""
    for folder, children, _ in os.walk(root):
        path = Path(folder)
        if is_run(path):
            children.clear()
            yield path
        children[:] = sorted(c for c in children if not c.startswith("."))


def headline(path: Path, run: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The line of one run in a list; `run` is what `show_run` says of it."""
    return {
        "dir": str(path),
        "status": run["status"],
        "step": run["step"],
        "steps": run["steps"],
        "algorithm": config.get("algorithm.name"),
        "model": config.get("model.path"),
        "reward": run["last"].get("reward/mean"),
        "best_eval": run["best_eval"],
        "troubles": run["troubles"],
        "updated": (path / "metrics.jsonl").stat().st_mtime,
    }


def show_run(path: Path) -> dict[str, Any]:
    """Everything worth saying about one run: settings, last value of each metric, best evaluation,
    checkpoints, events.
    """
    path = Path(path)
    if not is_run(path):
        raise InputError(
            "this is not a run directory (no metrics.jsonl and config.json).",
            where=str(path),
            fix="`reinforge runs list` shows the runs.",
        )
    progress = RunProgress()
    for line in read_lines(path / "metrics.jsonl"):
        progress.observe(line)
    events = list(read_lines(path / "events.jsonl"))
    found = Doctor.of(path).troubles(ended=status(path, events) != "running")
    config = flatten(read_json(path / "config.json"))
    return describe_run(path, config, progress, events, found)


@dataclass
class RunProgress:
    """How far a run is by its lines of metrics, which whoever reads them tells it one by one."""

    step: int = 0
    best: dict[str, Any] | None = None  # evaluation
    first: dict[str, Any] | None = None
    evaluated: int | None = None  # the step of the newest one
    _last: dict[str, Any] = field(default_factory=dict)
    _names: tuple[str, ...] = ()  # of the newest line of a step

    @property
    def last(self) -> dict[str, float]:
        """The newest value of each metric."""
        return {
            k: v
            for k, v in self._last.items()
            if isinstance(v, int | float) and k not in ("step", "time")
        }

    def observe(self, line: Mapping[str, Any]) -> None:
        self.step = max(self.step, int(line.get("step", 0)))
        if "time/step" in line and (names := tuple(line)) != self._names:
            last = self._last
            self._last = {k: last[k] for k in last if not k.startswith(OF_ONE_STEP)}
            self._names = names
        if None in line.values():
            for name in [k for k, v in line.items() if v is None and k.startswith(EVALUATED)]:
                self._last.pop(name, None)  # the newest evaluation could not tell
            line = {k: v for k, v in line.items() if v is not None}
        self._last.update(line)
        self.best = _better(self.best, line)
        self.first = self.first or self.best
        if self.best is not None and self.best["metric"] in line:
            self.evaluated = line.get("step")


def describe_run(
    path: Path,
    config: Mapping[str, Any],
    progress: RunProgress,
    events: Sequence[Mapping[str, Any]],
    found: Sequence[Trouble],
) -> dict[str, Any]:
    """What `show_run` says, from what was read of the logs and what the doctor found."""
    how = status(path, events)
    bare = uncontained(path)
    parents = lineage(path)
    return {
        "dir": str(path),
        "status": how,
        "why": why_ended(events) if how in ENDINGS else None,
        "step": progress.step,
        "steps": total_steps(events, config),
        "troubles": [str(trouble) for trouble in found if trouble.is_cause],
        "notes": [str(trouble) for trouble in found if trouble.action == "note"],
        "config": {
            **{k: config[k] for k in _told(progress.last) if _says(k, config.get(k))},
            **_rewards(config),
        },
        **({"uncontained": bare} if bare else {}),
        **({"branch_of": [f"{p['dir']} step {p['step']}" for p in parents]} if parents else {}),
        "last": progress.last,
        "best_eval": progress.best,
        "first_eval": progress.first,
        "last_eval_step": progress.evaluated,
        "checkpoints": checkpoints(path),
        "events": list(events[-20:]),
        "versions": read_json(path / "versions.json"),
    }


def _says(key: str, value: Any) -> bool:
    return bool(value) if key in IF_SET else value is not None


def _rewards(config: Mapping[str, Any]) -> dict[str, str]:
    """The rewards among the settings of a run, with weights that are not 1.

    >>> _rewards({"rewards.0.name": "math", "rewards.0.weight": 1.0, "rewards.1.name": "tags"})
    {'rewards': 'math, tags'}
    >>> _rewards({"rewards.0.name": "math", "rewards.0.weight": 0.5}), _rewards({})
    ({'rewards': 'math x 0.5'}, {})
    """
    found = []
    for i in count():
        name = config.get(f"rewards.{i}.name")
        if name is None:
            break
        weight = config.get(f"rewards.{i}.weight", 1.0)
        found.append(str(name) if weight == 1 else f"{name} x {weight:g}")
    return {"rewards": ", ".join(found)} if found else {}


def newest_samples(path: Path, limit: int) -> list[dict[str, Any]]:
    """Lines of samples.jsonl, those of the newest step first; of one step what was trained on
    before what was evaluated.
    """
    steps: deque[list[dict[str, Any]]] = deque(maxlen=limit)  # each has one at least
    for line in read_lines(Path(path) / "samples.jsonl"):
        if not steps or steps[-1][0].get("step") != line.get("step"):
            steps.append([])
        steps[-1].append(line)
    ordered = (sorted(step, key=lambda line: "eval" in line) for step in reversed(steps))
    return list(islice(chain.from_iterable(ordered), limit))


def steps_begun(path: Path) -> int | None:
    """How many steps the logs of a directory tell of; None where no run was begun."""
    log = path / "metrics.jsonl"
    if not log.exists():
        return None
    return max((int(line.get("step", 0)) for line in read_lines(log)), default=0)


def total_steps(events: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> int | None:
    """How many steps the run is to take: what it said when it began, or the config's number."""
    told = [
        event["steps"]
        for event in events
        if event.get("kind") in BEGINNINGS and isinstance(event.get("steps"), int)
    ]
    return told[-1] if told else config.get("train.steps")


def why_ended(events: Sequence[Mapping[str, Any]]) -> str | None:
    """What the last ending said: why it stopped before its time, or the error."""
    for event in reversed(events):
        if event.get("kind") in ENDINGS:
            return event.get("stopped") or event.get("reason")
    return None


def _better(best: dict[str, Any] | None, line: Mapping[str, Any]) -> dict[str, Any] | None:
    for metric, choose in EVALS:
        value = line.get(metric)
        if isinstance(value, int | float) and (best is None or best["metric"] == metric):
            if best is None or (value != best["value"] and choose(value, best["value"]) == value):
                return {
                    "metric": metric,
                    "value": value,
                    "step": line.get("step"),
                    "low": line.get(f"{metric}_low"),
                    "high": line.get(f"{metric}_high"),
                }
            return best
    return best


def uncontained(path: Path) -> list[str]:
    """Rewards that ran what the model wrote without containment, in any part of the run."""
    events = read_lines(Path(path) / "events.jsonl")
    return sorted(
        {
            str(name)
            for e in events
            if e.get("kind") == "uncontained"
            for name in e.get("rewards") or ["?"]
        }
    )


def status(path: Path, events: Sequence[Mapping[str, Any]]) -> str:
    """How the last part of the run ended; where it did not say, running while the owner's lock is
    fresh, else interrupted.
    """
    for event in reversed(events):
        if event.get("kind") in ENDINGS:
            return str(event["kind"])
        if event.get("kind") in BEGINNINGS:
            break
    lock = path / "run.lock"
    if lock.exists() and time.time() - lock.stat().st_mtime < ALIVE_SECONDS:
        owner = read_json(lock)
        if owner.get("host") != socket.gethostname() or Path(f"/proc/{owner.get('pid')}").exists():
            return "running"
    return "interrupted"


def checkpoints(path: Path) -> list[dict[str, Any]]:
    """Oldest first.

    Only what has a manifest counts; whether it is intact is for `reinforge.checkpoint.store` to
    say.
    """
    root = path / "checkpoints"
    found = (
        sorted(
            p
            for p in root.iterdir()
            if re.fullmatch(r"step-\d+", p.name) and (p / "MANIFEST.json").is_file()
        )
        if root.is_dir()
        else []
    )
    return [
        {
            "path": str(p),
            "step": int(p.name[5:]),
            "bytes": sum(f.stat().st_size for f in p.iterdir()),
        }
        for p in found
    ]


def compare_runs(dirs: Sequence[Path]) -> dict[str, Any]:
    """{"runs", "config": only the keys that differ, "metrics": last values}: each value is a list,
    one entry per run.
    """
    runs = [show_run(d) for d in dirs]
    configs = [flatten(read_json(Path(d) / "config.json")) for d in dirs]
    keys = sorted(set().union(*configs) - {"run.dir"}) if configs else []
    rows = {key: [c.get(key) for c in configs] for key in keys}
    metrics = sorted(set().union(*(r["last"] for r in runs))) if runs else []
    return {
        "runs": [r["dir"] for r in runs],
        "status": [r["status"] for r in runs],
        "step": [r["step"] for r in runs],
        "config": {key: row for key, row in rows.items() if any(value != row[0] for value in row)},
        "metrics": {name: [r["last"].get(name) for r in runs] for name in metrics},
        "best_eval": [r["best_eval"] for r in runs],
    }
