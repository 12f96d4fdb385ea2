"""Where the actors of a run land and what they get: on machines with eight GPUs each, simulated by
a Ray whose nodes only say that they have them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from helpers.ray_cluster import need_ray

need_ray()
pytestmark = pytest.mark.timeout(600)
GPUS = 8
ENGINES = 4
SLOW = 2.0  # seconds that an engine takes to start
SHELL = {
    "NCCL_DEBUG": "WARN",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "TORCH_SHOW_CPP_STACKTRACES": "0",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "HF_HOME": "/somewhere",
    "OMP_NUM_THREADS": "3",
    "SOMETHING_ELSE": "1",
}


@contextmanager
def machines(count: int) -> Iterator[None]:
    from reinforge.cluster import connect  # before Ray: how it authenticates is settled then

    with pytest.MonkeyPatch.context() as patch:
        for name, value in connect.QUIET.items():
            patch.setenv(name, value)
        from ray.cluster_utils import Cluster

        node = {"num_cpus": 16, "num_gpus": GPUS, "object_store_memory": 80 << 20}
        cluster = Cluster(initialize_head=True, head_node_args=node)
        try:
            for _ in range(count - 1):
                cluster.add_node(**node)
            connect.ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
            yield
        finally:
            connect.ray.shutdown()
            cluster.shutdown()


@contextmanager
def opened(ranks: int, **keys: Any) -> Iterator[Any]:
    """The actors of a run, with GPUs that nobody looks for. They do not become ranks: that is what
    imports torch.
    """
    from reinforge.cluster.placement import plan
    from reinforge.cluster.ray_cluster import RayCluster
    from reinforge.cluster.worker_group import WorkerGroup
    from reinforge.config.cluster import ClusterConfig

    cfg = ClusterConfig(kind="ray", **keys)
    cluster = RayCluster(cfg, plan(cfg, ranks=ranks, critic=False, rewards=0, gpu=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkerGroup, "_rendezvous", lambda workers: None)
        cluster.begin()
        yield cluster
        cluster.close()


def machine_by_rank(workers: Any) -> list[int]:
    nodes = [where.node for where in workers.where]
    return [sorted(set(nodes)).index(node) for node in nodes]


def machine_by_bundle(workers: Any) -> list[int]:
    """As Ray placed them: what the order was before."""
    found = zip([place.bundle for place in workers.places], machine_by_rank(workers), strict=True)
    return [machine for _, machine in sorted(found)]


@pytest.mark.long
def test_three_machines_of_eight() -> None:
    with machines(3), opened(3 * GPUS) as cluster:
        workers = cluster.workers("policy")
        assert machine_by_rank(workers) == [0] * GPUS + [1] * GPUS + [2] * GPUS
        assert [where.devices for where in workers.where] == [(i,) for i in range(GPUS)] * 3
        # Ray deals bundles out without an order: rank 0 was alone on its machine
        assert machine_by_bundle(workers) != machine_by_rank(workers)


class TestTwoMachines:
    @pytest.fixture(scope="class")
    def cluster(self) -> Iterator[Any]:
        """Three ranks, which Ray spreads over both, most often as a, b, a; and four engines."""
        keys = {"layout": "split", "engines": ENGINES, "strategy": "spread"}
        with machines(2), pytest.MonkeyPatch.context() as patch:
            for name, value in SHELL.items():  # the machines were started in another one
                patch.setenv(name, value)
            with opened(3, **keys) as cluster:
                yield cluster

    def test_ranks_of_one_machine_are_neighbours(self, cluster: Any) -> None:
        workers = cluster.workers("policy")
        assert set(machine_by_bundle(workers)) == {0, 1}
        assert machine_by_rank(workers) in ([0, 0, 1], [0, 1, 1])
        devices = [where.devices for where in workers.where]
        assert machine_by_rank(workers) != [0, 0, 1] or devices[0] < devices[1]
        assert machine_by_rank(workers) != [0, 1, 1] or devices[1] < devices[2]

    def test_actors_have_the_environment_of_the_controller(self, cluster: Any) -> None:
        workers = cluster.workers("engine", 0)
        workers.make("environment", environment)
        env, threads = workers.apply("environment", tuple)
        missing = {name for name in SHELL if env.get(name) != SHELL[name]}
        assert missing == {"SOMETHING_ELSE"} and threads == 3

    def test_actors_of_a_machine_share_its_cores(
        self, cluster: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from reinforge.cluster import actor

        # 7 actors on two machines
        assert sorted(cluster.resources.shares().values()) == [
            (i, n) for i in range(4) for n in (3, 4) if i < n
        ]
        monkeypatch.setattr("reinforge.core.cpus.allowed_cpus", lambda: 64)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")  # what Ray says to an actor of one logical CPU
        assert [actor.Actor({}, os.getcwd(), [], 0, n).threads for n in (3, 4)] == [21, 16]
        assert os.environ["OMP_NUM_THREADS"] == "16"

    def test_engines_start_together(self, cluster: Any) -> None:
        """Four that take two seconds each took 17 s, one after the other."""
        from functools import partial

        from reinforge.cluster.engine import RemoteEngine

        groups = [partial(cluster.workers, "engine", i) for i in range(ENGINES)]
        for group in groups:  # torch is imported before the clock starts
            group().make("nothing", environment)
        began = time.monotonic()
        engine = RemoteEngine(cluster, groups, "engine", slow_engine, shares=False)
        took = time.monotonic() - began
        spans = [replica.workers.apply("engine", tuple) for replica in engine.replicas]
        assert len(spans) == ENGINES and all(end - start >= SLOW for start, end in spans)
        assert max(start for start, _ in spans) < min(end for _, end in spans)
        assert took < 5.0


# ---- in actors ----


def environment(objects: dict[str, Any]) -> tuple[dict[str, str], int]:
    import torch

    return dict(os.environ), torch.get_num_threads()


def slow_engine(objects: dict[str, Any]) -> tuple[float, float]:
    began = time.time()
    time.sleep(SLOW)
    return began, time.time()
