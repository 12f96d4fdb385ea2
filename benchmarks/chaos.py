"""Kill workers of a run under Ray at random moments, and see whether it comes out as if nobody had.

    python benchmarks/chaos.py --kills 30 --seed 0 --out benchmarks/results/chaos.json

A split layout on one machine: a trainer and two engines, each an actor, with a spare beside each
and a snapshot in memory after every step. Every few steps one of the three gets SIGKILL at a random
moment of a step, all a function of `--seed`. An engine is made again and asked again for what it
held; the trainer is made again and goes on from the snapshot. Then the same run undisturbed: the
digest of the last checkpoint (weights, moments, cursor, counters) and all samples must be equal.
Time to recover is from the kill to the event `actor_restored`: the actor has its weights and works.
Exits with 1 unless every kill was recovered from and everything is equal.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from helpers.open_clusters import open_cluster, watch_clusters  # noqa: E402
from helpers.tiny_runs import digest, launch, lines, make_config  # noqa: E402
from reinforge.cluster.connect import ray_connection  # noqa: E402
from reinforge.config.cluster import ClusterConfig  # noqa: E402
from reinforge.models.tiny import make_tiny_model  # noqa: E402

ROLES = ("policy", "engine-0", "engine-1")
APART = 3  # steps from one kill to the next
PATIENCE = 240.0  # seconds to recover


class Killer(threading.Thread):
    """Waits for a step to be logged, then a random part of a step, then kills; and waits until the
    run is whole again.
    """

    def __init__(self, folder: Path, kills: int, seed: int):
        super().__init__(daemon=True)
        self.folder = folder
        self.kills = kills
        self.rng = random.Random(seed)
        self.done: list[dict[str, Any]] = []
        self.over = threading.Event()

    def steps(self) -> int:
        path = self.folder / "metrics.jsonl"
        found = (
            [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
            if path.exists()
            else []
        )
        return max((line["step"] for line in found), default=0)

    def until(self, ready: Any, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not self.over.is_set() and time.monotonic() < end:
            if ready():
                return True
            time.sleep(0.02)
        return False

    def run(self) -> None:
        for i in range(self.kills):
            role = self.rng.choice(ROLES)
            wait = self.rng.random()
            if not self.until(partial(self.reached, 1 + i * APART), 600):
                return
            time.sleep(wait * 0.5)
            if not self.kill(role):
                return

    def reached(self, step: int) -> bool:
        return self.steps() >= step

    def kill(self, role: str) -> bool:
        cluster = open_cluster()
        if cluster is None or not self.until(
            lambda: role in cluster.worker_groups and bool(cluster.worker_groups[role].where), 60
        ):
            return False
        known = len(cluster.events)
        at = time.time()
        os.kill(cluster.worker_groups[role].where[0].pid, signal.SIGKILL)

        def back() -> list[float]:
            return [
                e["at"] - at
                for e in cluster.events[known:]
                if e["kind"] == "actor_restored" and e["role"] == role
            ]

        recovered = self.until(back, PATIENCE)
        seconds = back()[0] if recovered else None
        self.done.append(
            {"role": role, "step": self.steps(), "recovered": recovered, "seconds": seconds}
        )
        told = "LOST" if seconds is None else f"back in {seconds:.1f} s"
        print(f"kill {len(self.done)}: {role} at step {self.done[-1]['step']}: {told}", flush=True)
        return True


def samples(cfg: Any) -> list[tuple[Any, ...]]:
    return [(line["step"], line["uid"], line["completion"]) for line in lines(cfg, "samples.jsonl")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--spares", type=int, default=1)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rf-chaos-") as name:
        folder = Path(name)
        model = make_tiny_model(
            folder / "model", width=32, layers=2, heads=4, kv_heads=2, context=128
        )
        overrides = (
            "cluster.kind=ray",
            "cluster.layout=split",
            "cluster.engines=2",
            "cluster.snapshot=1",
            f"cluster.spares={asked.spares}",
            f"train.steps={2 + asked.kills * APART}",
            "run.log.samples_every=1",
            "run.checkpoint.every=20",
        )
        with ray_connection(ClusterConfig(kind="ray", object_store_gib=0.3), 8):
            hurt = make_config(str(model), folder, "hurt", "grpo", *overrides)
            watch_clusters()
            killer = Killer(Path(hurt.run.dir), asked.kills, asked.seed)
            killer.start()
            began = time.monotonic()
            launch(hurt)
            seconds = time.monotonic() - began
            killer.over.set()
            killer.join()
            whole = make_config(str(model), folder, "whole", "grpo", *overrides)
            began = time.monotonic()
            launch(whole)
            undisturbed = time.monotonic() - began
        took = [kill["seconds"] for kill in killer.done if kill["seconds"] is not None]
        by_role = {
            role: [
                k["seconds"] for k in killer.done if k["role"] == role and k["seconds"] is not None
            ]
            for role in ROLES
        }
        result = {
            "kills": len(killer.done),
            "recovered": sum(k["recovered"] for k in killer.done),
            "lost": sum(not k["recovered"] for k in killer.done),
            "seconds_to_recover": (
                {"median": statistics.median(took), "max": max(took)} if took else None
            ),
            "by_role": {
                role: {"kills": len(t), "median": statistics.median(t), "max": max(t)}
                for role, t in by_role.items()
                if t
            },
            "digest_equal": digest(hurt) == digest(whole),
            "samples_equal": samples(hurt) == samples(whole),
            "steps": hurt.train.steps,
            "run_seconds": round(seconds, 1),
            "undisturbed_seconds": round(undisturbed, 1),
            "seed": asked.seed,
            "spares": asked.spares,
            "cpus": os.cpu_count(),
            "load": os.getloadavg()[2],
        }
    print(json.dumps(result, indent=1))
    if asked.out is not None:
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
    raise SystemExit(
        result["recovered"] != asked.kills
        or not result["digest_equal"]
        or not result["samples_equal"]
    )


if __name__ == "__main__":
    main()
