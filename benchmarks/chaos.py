"""Kill engines, trainers and servers of runs at random moments, and count what is lost.

    python benchmarks/chaos.py --kills 50 --seed 0 --out benchmarks/results/chaos.json

Four scenes, each a run of a tiny model that is hurt (SIGKILL at a random moment of a step, a
function of `--seed`) and, where the contract promises that it comes out the same, the run again
undisturbed:

- `actors`: a trainer and two engines in actors of Ray, a spare beside each, a snapshot after every
  step, `model.exact`. What a lost engine held is asked of the other at once. Same digest (weights,
  moments, cursor, counters) and same samples.
- `partial`: the same with `rollout.partial`: answers that a killed engine had begun go on from the
  tokens that it had told. The clock says what a step cuts, so samples are counted and not compared.
- `servers`: two servers of one process, stubs (`--server stub`: same digest) or vLLM on a CPU
  (`--server vllm`: counted).
- `nodes`: three machines of Ray with one rank of FSDP2 each, and one of them removed, once. Same
  digest.

A sample is lost if a prompt that was given out is neither trained nor in the last checkpoint.
`rerouted` is from a kill that found requests in the victim's hands to the moment when they were
sent elsewhere, `back` to the moment when the victim works again. Exits with 1 unless nothing was
lost, everything came back, every request was rerouted within 10 s and all digests are equal.
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
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from helpers.open_clusters import open_cluster, watch_clusters  # noqa: E402
from helpers.tiny_runs import digest, launch, lines, make_config  # noqa: E402
from reinforge.checkpoint import store  # noqa: E402
from reinforge.cluster.connect import ray_connection  # noqa: E402
from reinforge.config.cluster import ClusterConfig  # noqa: E402
from reinforge.models.tiny import make_tiny_model  # noqa: E402

APART = 3  # steps from one kill to the next
PATIENCE = 240.0  # seconds to recover
REROUTED = 10.0  # seconds, at most
SCENES = ("actors", "partial", "servers", "nodes")
ACTORS = (
    "cluster.kind=ray",
    "cluster.layout=split",
    "cluster.engines=2",
    "cluster.snapshot=1",
    "rollout.max_new_tokens=48",
)
PARTIAL = (
    "rollout.partial=true",
    "rollout.staleness=2",
    "rollout.max_batch=6",
    "sampling.over_provision=1.5",
)


class Killer(threading.Thread):
    """Waits for a step to be logged, then a random part of a step, then kills; and waits until the
    run is whole again. A subclass knows who can be killed, and when it is back.
    """

    roles: tuple[str, ...]

    def __init__(self, folder: Path, kills: int, seed: int):
        super().__init__(daemon=True)
        self.folder = folder
        self.kills = kills
        self.rng = random.Random(seed)
        self.done: list[dict[str, Any]] = []
        self.over = threading.Event()

    def strike(self, role: str) -> Callable[[], tuple[float | None, float | None]] | None:
        """Kills. What comes back says when requests were rerouted and when the victim was back,
        in seconds since; None: there is nobody to kill.
        """
        raise NotImplementedError

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
            role = self.rng.choice(self.roles)
            wait = self.rng.random()
            if not self.until(partial(self.reached, 1 + i * APART), 600):
                return
            time.sleep(wait * 0.5)
            if not self.kill(role):
                return

    def reached(self, step: int) -> bool:
        return self.steps() >= step

    def kill(self, role: str) -> bool:
        seen = self.strike(role)
        if seen is None:
            return False
        recovered = self.until(lambda: seen()[1] is not None, PATIENCE)
        rerouted, back = seen()
        self.done.append(
            {
                "role": role,
                "step": self.steps(),
                "recovered": recovered,
                "rerouted": rerouted,
                "back": back,
            }
        )
        told = "LOST" if back is None else f"back in {back:.1f} s"
        moved = "" if rerouted is None else f", requests elsewhere in {rerouted:.2f} s"
        print(
            f"kill {len(self.done)}: {role} at step {self.done[-1]['step']}: {told}{moved}",
            flush=True,
        )
        return True


class ActorKiller(Killer):
    """Of the actors of a run under Ray."""

    roles = ("policy", "engine-0", "engine-1")

    def strike(self, role: str) -> Callable[[], tuple[float | None, float | None]] | None:
        cluster = open_cluster()
        if cluster is None or not self.until(
            lambda: role in cluster.worker_groups and bool(cluster.worker_groups[role].where), 60
        ):
            return None
        known = len(cluster.events)
        at = time.time()
        os.kill(cluster.worker_groups[role].where[0].pid, signal.SIGKILL)

        def seen(kind: str) -> float | None:
            times = [
                e["at"] - at
                for e in cluster.events[known:]
                if e["kind"] == kind and e["role"] == role
            ]
            return times[0] if times else None

        return lambda: (seen("requests_rerouted"), seen("actor_restored"))


class ServerKiller(Killer):
    """Of the servers of a run in this process."""

    roles = ("server-0", "server-1")

    def __init__(self, folder: Path, kills: int, seed: int):
        super().__init__(folder, kills, seed)
        from reinforge.engines.served.engine import ServedEngine

        self.engines: list[ServedEngine] = []
        self.lost: list[float] = []
        made, lost = ServedEngine.__init__, ServedEngine._lost

        def making(engine: ServedEngine, *args: Any, **named: Any) -> None:
            made(engine, *args, **named)
            self.engines.append(engine)

        def losing(engine: ServedEngine, replica: Any, life: int) -> None:
            before = engine.restarts
            lost(engine, replica, life)
            if engine.restarts > before:  # who asked goes to another replica next
                self.lost.append(time.monotonic())

        ServedEngine.__init__ = making  # type: ignore[method-assign]
        ServedEngine._lost = losing  # type: ignore[method-assign]

    def strike(self, role: str) -> Callable[[], tuple[float | None, float | None]] | None:
        if not self.engines:
            return None
        engine = self.engines[-1]
        replica = engine.replicas[int(role[-1])]
        if not self.until(lambda: replica.up and replica.version == engine.version, 120):
            return None
        process = replica.process
        assert process is not None
        held = replica.load
        known = len(self.lost)
        life = replica.life
        at = time.monotonic()
        os.kill(process.pid, signal.SIGKILL)
        back: list[float] = []

        def seen() -> tuple[float | None, float | None]:
            there = replica.life > life and replica.up and replica.version == engine.version
            if there and not back:
                back.append(time.monotonic() - at)
            moved = self.lost[known] - at if held and len(self.lost) > known else None
            return moved, back[0] if back else None

        return seen


# ---- what came out ----


def samples(cfg: Any) -> list[tuple[Any, ...]]:
    return [(line["step"], line["uid"], line["completion"]) for line in lines(cfg, "samples.jsonl")]


def counted(cfg: Any) -> dict[str, int]:
    """Samples that were trained, twice, or lost: of a prompt that was given out and is neither
    trained nor under way in the last checkpoint.
    """
    uids = [line["uid"] for line in lines(cfg, "samples.jsonl")]
    size = cfg.algorithm.group_size
    trained = {int(uid.partition(":")[0]) for uid in uids}
    newest = store.latest(Path(cfg.run.dir))
    assert newest is not None
    part = store.load(newest)[1]["parts"].get("partial", {"carried": []})
    under_way = {position for position, *_ in part["carried"]}
    gone = set(range(max(trained | under_way) + 1)) - trained - under_way
    missing = size * len(trained) - len(set(uids))
    return {
        "samples": len(set(uids)),
        "twice": len(uids) - len(set(uids)),
        "lost": size * len(gone) + missing,
        "under_way": size * len(under_way),
    }


def run_scene(
    config: Callable[..., Any], settings: tuple[str, ...], killer: type[Killer], asked: Any
) -> dict[str, Any]:
    """A run that is hurt; `asked.compare`: then the same undisturbed."""
    overrides = (
        *settings,
        f"train.steps={2 + asked.kills * APART}",
        "run.log.samples_every=1",
        "run.log.samples=99",
        "run.checkpoint.every=20",
    )
    hurt = config("hurt", "grpo", *overrides)
    hurting = killer(Path(hurt.run.dir), asked.kills, asked.seed)
    hurting.start()
    began = time.monotonic()
    launch(hurt)
    seconds = time.monotonic() - began
    hurting.over.set()
    hurting.join()
    result = {
        "kills": len(hurting.done),
        "recovered": sum(k["recovered"] for k in hurting.done),
        **counted(hurt),
        "rerouted": spread([k["rerouted"] for k in hurting.done]),
        "back": spread([k["back"] for k in hurting.done]),
        "steps": hurt.train.steps,
        "run_seconds": round(seconds, 1),
        "by_kill": hurting.done,
    }
    if asked.compare:
        whole = config("whole", "grpo", *overrides)
        began = time.monotonic()
        launch(whole)
        result |= {
            "undisturbed_seconds": round(time.monotonic() - began, 1),
            "digest_equal": digest(hurt) == digest(whole),
            "samples_equal": samples(hurt) == samples(whole),
        }
    return result


def spread(found: list[float | None]) -> dict[str, Any] | None:
    times = [t for t in found if t is not None]
    if not times:
        return None
    return {"times": len(times), "median": statistics.median(times), "max": max(times)}


def fine(result: dict[str, Any], kills: int) -> bool:
    slowest = (result.get("rerouted") or {"max": 0.0})["max"]
    return (
        result["recovered"] == kills
        and result["lost"] == result["twice"] == 0
        and slowest <= REROUTED
        and result.get("digest_equal", True)
        and result.get("samples_equal", True)
    )


# ---- scenes ----


def under_ray(asked: Any, folder: Path, config: Callable[..., Any], *more: str) -> dict[str, Any]:
    watch_clusters()
    with ray_connection(ClusterConfig(kind="ray", object_store_gib=0.3), 8):
        settings = (*ACTORS, f"cluster.spares={asked.spares}", *more)
        return run_scene(config, settings, ActorKiller, asked)


def actors(asked: Any, folder: Path, config: Callable[..., Any]) -> dict[str, Any]:
    asked.compare = True
    return under_ray(asked, folder, config, "model.exact=true")


def partial_rollouts(asked: Any, folder: Path, config: Callable[..., Any]) -> dict[str, Any]:
    asked.compare = False
    return under_ray(asked, folder, config, *PARTIAL)


def servers(asked: Any, folder: Path, config: Callable[..., Any]) -> dict[str, Any]:
    asked.compare = asked.server == "stub"
    settings = ("engine.replicas=2", "rollout.max_new_tokens=48")
    if asked.server == "vllm":
        from helpers.vllm_python import vllm_python

        settings += ("rollout.engine=vllm", f"engine.python={vllm_python()}")
        return run_scene(config, settings, ServerKiller, asked)
    with stub_servers(folder):
        return run_scene(config, (*settings, "rollout.engine=sglang"), ServerKiller, asked)


@contextmanager
def stub_servers(folder: Path) -> Any:
    """Inside, SGLang is a bigram model, and the proof after an update knows that."""
    from helpers.paths import TESTS
    from helpers.stub_servers import bigram, stub_of
    from reinforge.build import engines

    def score_of(model: Any) -> Any:
        table = model.causal.get_input_embeddings().weight
        return lambda tokens: bigram(table.detach().float(), list(tokens))

    stub_of("sglang").install(folder / "site")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder / "site"), str(TESTS)])
    before = engines.trainer_score
    engines.trainer_score = score_of
    try:
        yield
    finally:
        engines.trainer_score = before


def nodes(asked: Any, folder: Path, config: Callable[..., Any]) -> dict[str, Any]:
    from helpers.three_machines import lose_one_of_three

    return lose_one_of_three(config)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50, help="over all scenes but `nodes`")
    parser.add_argument("--scenes", default=",".join(SCENES))
    parser.add_argument("--server", choices=("stub", "vllm"), default="stub")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--spares", type=int, default=1)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    scenes = {"actors": actors, "partial": partial_rollouts, "servers": servers, "nodes": nodes}
    wanted = asked.scenes.split(",")
    shared = [name for name in wanted if name != "nodes"]
    results: dict[str, Any] = {}
    every = asked.kills
    for name in wanted:
        asked.kills = 1 if name == "nodes" else len(range(shared.index(name), every, len(shared)))
        print(f"{name}: {asked.kills} kills", flush=True)
        with tempfile.TemporaryDirectory(prefix="rf-chaos-") as place:
            folder = Path(place)
            model = make_tiny_model(
                folder / "model", width=32, layers=2, heads=4, kv_heads=2, context=128
            )
            results[name] = scenes[name](asked, folder, partial(make_config, str(model), folder))
        results[name]["fine"] = fine(results[name], asked.kills)
    print(table(results))
    told = {
        "kills": sum(r["kills"] for r in results.values()),
        "lost": sum(r["lost"] for r in results.values()),
        "server": asked.server,
        "seed": asked.seed,
        "spares": asked.spares,
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[2],
        "scenes": results,
    }
    if asked.out is not None:
        asked.out.write_text(json.dumps(told, indent=1) + "\n")
    raise SystemExit(not all(r["fine"] for r in results.values()))


def table(results: dict[str, Any]) -> str:
    """A row a scene, in Markdown."""
    rows = [
        "| scene | kills | back | samples | lost | twice | rerouted s | back s | same run |",
        "|---|--:|--:|--:|--:|--:|---|---|---|",
    ]
    for name, r in results.items():
        times = [
            "-" if t is None else f"{t['median']:.2f}, at most {t['max']:.2f}"
            for t in (r.get("rerouted"), r.get("back"))
        ]
        same = {True: "yes", False: "NO", None: "not promised"}[r.get("digest_equal")]
        counts = (r["kills"], r["recovered"], r["samples"], r["lost"], r["twice"])
        rows.append(f"| {name} | {' | '.join(map(str, counts))} | {' | '.join(times)} | {same} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
