"""reinforge's side of gpu_dpo.py: the ordinary run of a config, timed from outside. argv: a JSON
object with model, rows, steps, pairs, budget, compile, precompute, rate, beta, and `profile`: the
number of a step whose kernels are told.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

import torch

from reinforge.build import supervised
from reinforge.build.run import train_config
from reinforge.config.load import config_from_dict

given = json.loads(sys.argv[1])
cuda = torch.cuda.is_available()


def now() -> float:
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


class Clock:
    """A view that only takes the time."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.lines: list[dict[str, float]] = []
        self.reserved = 0
        self.profile: torch.profiler.profile | None = None
        self.kernels = ""

    def start(self, total_steps: int, title: str, first_step: int = 0) -> None:
        self.times.append(now())

    def update(self, step: int, metrics: dict[str, float]) -> None:
        self.times.append(now())
        self.lines.append(dict(metrics))
        self.reserved = max(self.reserved, torch.cuda.memory_reserved() if cuda else 0)
        if self.profile is not None:
            self.profile.__exit__(None, None, None)
            for by in ("self_device_time_total", "self_cpu_time_total"):
                self.kernels += self.profile.key_averages().table(
                    sort_by=by, row_limit=25, max_name_column_width=70
                )
            self.profile = None
        if given.get("profile") == step + 1:
            self.profile = torch.profiler.profile().__enter__()

    def table(self, groups: Any) -> None: ...

    def message(self, text: str) -> None:
        print(text, file=sys.stderr)

    def doing(self, text: str) -> None: ...

    def troubles(self, found: Any) -> None: ...

    def stop(self) -> None: ...


clock = Clock()
spent = {"precompute": 0.0}
lengths = list[int]()
precompute_reference = supervised.precompute_reference
make_units = supervised.make_units


def timed(*args: Any) -> Any:
    start = now()
    found = precompute_reference(*args)
    spent["precompute"] += now() - start
    return found


def counted(*args: Any) -> Any:
    found = make_units(*args)
    lengths.extend(sum(len(sample.tokens) for sample in unit) for unit in found.units)
    return found


supervised.precompute_reference = timed
supervised.make_units = counted
cfg = config_from_dict(
    {
        "model": {"path": given["model"], "compile": given["compile"]},
        "algorithm": {"name": "dpo", "beta": given["beta"]},
        "data": {"source": given["rows"], "chat": "never", "shuffle": False},
        "rewards": [],
        "train": {
            "steps": given["steps"],
            "prompts_per_step": given["pairs"],
            "learning_rate": given["rate"],
            "precompute_reference": given["precompute"],
            "tokens_per_microbatch": given["budget"] or "auto",
        },
        "run": {"dir": tempfile.mkdtemp(), "checkpoint": {"every": 0}, "log": {"samples_every": 0}},
    }
)
train_config(cfg, view=clock)
pairs = given["pairs"]
print(
    json.dumps(
        {
            "peer": "reinforge",
            **{k: given[k] for k in ("budget", "compile", "precompute")},
            "seconds": [b - a for a, b in zip(clock.times, clock.times[1:], strict=False)],
            "losses": [line["train/loss"] for line in clock.lines],
            "tokens": [
                sum(lengths[i : i + pairs]) for i in range(0, pairs * given["steps"], pairs)
            ],
            "computed": [line["tokens/processed"] for line in clock.lines],
            "peak_gib": max(line["memory/peak_gib"] for line in clock.lines) if cuda else 0.0,
            "reserved_gib": clock.reserved / 2**30,
            "precompute_s": spent["precompute"],
            "phases": {k: clock.lines[-1][k] for k in clock.lines[-1] if k.startswith("time/")},
            "knobs": cfg.train.model_dump(mode="json"),
            "kernels": clock.kernels,
        }
    )
)
