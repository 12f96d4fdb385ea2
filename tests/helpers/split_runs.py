"""Shared by tests of runs on several ranks: the same run in one process, and half of it in each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.tiny_runs import EVAL, launch, lines, tensors
from helpers.toys import SilentView, relative
from reinforge.build.caller_objects import CallerObjects
from reinforge.build.run import train_config

PAIRS = [
    {"prompt": f"{i}+{i}=", "chosen": str(2 * i), "rejected": f"{i} and {i}"} for i in range(16)
]
WATCHED = (
    "train/loss",
    "train/grad_norm",
    "reward/mean",
    "eval/loss",
    "policy/kl",
    "tokens/trained",
    "critic/loss",
)


def compare(make: Any, algorithm: str, there: tuple[str, ...], **sections: Any) -> None:
    """Rollouts, rewards and steps with the keys `there`; then half of it there and the rest in one
    process, and the other way round.
    """
    alone = tuple(key for key in there if not key.startswith("train."))
    runs_of = {
        name: make(name, algorithm, *keys, **sections)
        for name, keys in (("one", alone), ("two", there))
    }
    for cfg in runs_of.values():
        start(cfg)
    log = {
        name: [{k: v for k, v in line.items() if k in WATCHED} for line in lines(cfg)]
        for name, cfg in runs_of.items()
    }
    first = {
        name: next(line["train/loss"] for line in found if "train/loss" in line)
        for name, found in log.items()
    }
    assert abs(first["two"] - first["one"]) < 1e-6 and len(log["one"]) == len(log["two"])
    for ours, theirs in zip(log["two"], log["one"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)
    wanted = tensors(runs_of["one"])
    trained = [k for k in wanted if "model/" in k]
    for before, after in ((alone, there), (there, alone)):
        name = "half" + str(len(before))
        start(make(name, algorithm, *before, "train.steps=1", **sections))
        end = make(name, algorithm, *after, **sections)
        start(end)
        found = tensors(end)
        assert relative({k: found[k] for k in trained}, {k: wanted[k] for k in trained}) < 1e-4


def start(cfg: Any) -> None:
    if cfg.algorithm.name == "dpo":
        train_config(cfg, CallerObjects(data=PAIRS), SilentView())
    else:
        launch(cfg, eval_data=EVAL if cfg.algorithm.name == "sft" else None)


def served_by(pid: int) -> int:
    found = [
        int(p)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for p in (task / "children").read_text().split()
    ]
    (one,) = [p for p in found if "distributed.ranks" in Path(f"/proc/{p}/cmdline").read_text()]
    return one
