"""What the orchestration costs: seconds per step with the workers as actors of Ray, against the
same work in one process.

    python benchmarks/ray_overhead.py --out benchmarks/results/ray_overhead.json

The same config, in turns (here, Ray, here, Ray, ...), each run in full, so that a machine that gets
busy hurts both. The first step of a run is left out; start-up is reported by itself. Both are
bit-identical (checked), so the work is the same.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from helpers.tiny_runs import digest, launch, lines, make_config  # noqa: E402
from reinforge.cluster.connect import ray_connection  # noqa: E402
from reinforge.config.cluster import ClusterConfig  # noqa: E402
from reinforge.models.tiny import make_tiny_model  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    data = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(64)]
    steps: dict[str, list[float]] = {"local": [], "ray": []}
    phases: dict[str, dict[str, list[float]]] = {"local": {}, "ray": {}}
    starts: dict[str, list[float]] = {"local": [], "ray": []}
    digests = set()
    with (
        tempfile.TemporaryDirectory(prefix="rf-overhead-") as name,
        ray_connection(ClusterConfig(kind="ray", object_store_gib=0.5), 4),
    ):
        folder = Path(name)
        model = make_tiny_model(folder / "model", width=asked.width, layers=4, heads=4, context=256)
        for i in range(asked.rounds):
            for kind in ("local", "ray"):
                cfg = make_config(
                    str(model),
                    folder,
                    f"{kind}-{i}",
                    "grpo",
                    f"cluster.kind={kind}",
                    f"train.steps={asked.steps}",
                    "algorithm.group_size=8",
                    "train.prompts_per_step=8",
                    "rollout.max_new_tokens=48",
                    "rollout.kv_gib=0.1",
                )
                began = time.monotonic()
                launch(cfg, data=data)
                whole = time.monotonic() - began
                found: list[dict[str, Any]] = [line for line in lines(cfg) if "time/step" in line]
                steps[kind] += [line["time/step"] for line in found[1:]]
                for line in found[1:]:
                    for key in (k for k in line if k.startswith("time/") and k.count("/") == 1):
                        phases[kind].setdefault(key, []).append(line[key])
                starts[kind].append(whole - sum(line["time/step"] for line in found))
                digests.add(digest(cfg))
                print(
                    f"{kind}: median step"
                    f" {statistics.median(line['time/step'] for line in found[1:]):.3f} s",
                    flush=True,
                )
    medians = {kind: statistics.median(found) for kind, found in steps.items()}
    result = {
        "seconds_per_step": medians,
        "ratio": medians["ray"] / medians["local"],
        "steps": {kind: len(found) for kind, found in steps.items()},
        "extra_milliseconds": 1000 * (medians["ray"] - medians["local"]),
        "phases": {
            kind: {key: round(statistics.median(v), 4) for key, v in found.items()}
            for kind, found in phases.items()
        },
        "outside_of_steps": {
            kind: round(statistics.median(found), 1) for kind, found in starts.items()
        },
        "bit_identical": len(digests) == 1,
        "width": asked.width,
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[1],
    }
    print(json.dumps(result, indent=1))
    if asked.out is not None:
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
    raise SystemExit(not result["bit_identical"])


if __name__ == "__main__":
    main()
