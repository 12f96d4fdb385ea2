"""A run on three machines that loses one: for a test and for benchmarks/chaos.py. The machines are
nodes of one Ray on this host, each with room for two of the run's ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from helpers.ray_cluster import Hurting, plain
from helpers.tiny_runs import digest, launch, lines

RANKS = 3
SETTINGS = (
    "cluster.kind=ray",
    "cluster.strategy=spread",
    "train.backend=fsdp",
    f"train.ranks={RANKS}",
    "train.steps=4",
    "run.checkpoint.every=1",
    "run.log.samples_every=1",
    "run.log.samples=99",
)


@contextmanager
def machines(count: int) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The cluster, and its nodes by id beside the head, which runs nothing."""
    from ray.cluster_utils import Cluster

    from reinforge.cluster.connect import ray  # before Ray: how it authenticates is settled then

    small = {"object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
    try:
        nodes = [cluster.add_node(num_cpus=2, **small) for _ in range(count)]
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield cluster, {node.node_id: node for node in nodes}
    finally:
        ray.shutdown()
        cluster.shutdown()


def lose_one_of_three(config: Callable[..., Any]) -> dict[str, Any]:
    """What came of a run with a rank on each, whose last rank's machine is removed in the middle of
    a step, beside the same run on three that stay. `config`: as `make_config`, from the name on.
    """
    from helpers.open_clusters import open_cluster

    places: list[list[str]] = []
    at: list[float] = []

    with machines(3) as (cluster, nodes):

        def remove() -> None:
            opened = open_cluster()
            assert opened is not None
            places.append([where.node for where in opened.worker_groups["policy"].where])
            at.append(time.time())
            cluster.remove_node(nodes[places[0][-1]], allow_graceful=False)

        hurt = config("hurt", "grpo", *SETTINGS)
        launch(hurt, Hurting(6, remove))
    with machines(3):
        whole = config("whole", "grpo", *SETTINGS)
        launch(whole, plain)
    events = lines(hurt, "events.jsonl")
    back = [e["at"] - at[0] for e in events if e["kind"] == "actor_restored"]
    uids = [line["uid"] for line in lines(hurt, "samples.jsonl")]
    wanted = {line["uid"] for line in lines(whole, "samples.jsonl")}
    return {
        "kills": 1,
        "recovered": len(back),
        "machines": len(set(places[0])),
        "samples": len(set(uids)),
        "twice": len(uids) - len(set(uids)),
        "lost": len(wanted - set(uids)),
        "back": {"times": len(back), "median": back[0], "max": max(back)} if back else None,
        "steps": hurt.train.steps,
        "digest_equal": digest(hurt) == digest(whole),
    }
