"""What Ray is asked of beside a run: machines that go, controllers that die, tokens, weights that
change under way.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers import ray_cluster
from helpers.paths import SRC
from helpers.ray_cluster import FAST, Hurting, need_ray, plain
from helpers.tiny_runs import digest, launch, lines, make_config
from helpers.toys import make_samples
from reinforge.algorithms.losses.supervised import NLLLoss
from reinforge.checkpoint import store
from reinforge.core.batch import Totals, pack
from reinforge.core.engine import Completion, Sampling
from reinforge.core.errors import InputError

need_ray()
pytestmark = pytest.mark.timeout(600)


def ours(folder: str) -> set[int]:
    """Processes that inherited this temporary directory."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (
                f"TMPDIR={folder}".encode() in (path / "environ").read_bytes()
                and (path / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
            ):
                found.add(int(path.name))
        except OSError:
            continue
    return found


def until(ready: Callable[[], Any], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if ready():
            return True
        time.sleep(0.1)
    return False


@pytest.fixture
def short_tmp() -> Iterator[str]:
    """Names of sockets have a limit."""
    folder = tempfile.mkdtemp(prefix="rf", dir="/tmp")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.long
def test_a_killed_controller_leaves_nothing_and_the_same_command_goes_on(
    tiny_dir: str, tmp_path: Path, short_tmp: str
) -> None:
    """`reinforge train CONFIG cluster.kind=ray`, killed after its first checkpoint, then to its
    end; beside the run in one process.
    """
    config = {
        "model": {"path": tiny_dir},
        "algorithm": {"name": "grpo", "group_size": 4},
        "rewards": [{"name": "exact_number"}],
        "data": {"source": "arithmetic:chain", "options": {"size": 60, "max_value": 9, "terms": 2}},
        "rollout": {"max_new_tokens": 8, "kv_gib": 0.01},
        "train": {"steps": 40, "prompts_per_step": 4, "learning_rate": 1e-3},
        "run": {"dir": "run", "checkpoint": {"every": 2}},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    env = {
        **os.environ,
        "PYTHONPATH": str(SRC),
        "TMPDIR": short_tmp,
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
    }
    for name in [name for name in env if name.startswith("RAY_")]:
        del env[name]
    command = [
        sys.executable,
        "-m",
        "reinforge",
        "train",
        "config.yaml",
        "cluster.kind=ray",
        "cluster.object_store_gib=0.2",
    ]
    with (tmp_path / "log").open("w") as log:
        first = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=log, stderr=log)
    saved = until(lambda: store.latest(tmp_path / "run") or first.poll() is not None, 300)
    assert saved and first.poll() is None, (tmp_path / "log").read_text()
    (token,) = Path(short_tmp).glob("rf-token-*/token")
    assert (
        stat.S_IMODE(token.stat().st_mode) == 0o600
        and stat.S_IMODE(token.parent.stat().st_mode) == 0o700
    )
    worker, *_ = [
        pid for pid in ours(short_tmp) if b"ray::Actor" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert b"RAY_AUTH_MODE=token" in Path(f"/proc/{worker}/environ").read_bytes().split(b"\0")
    assert len(ours(short_tmp)) >= 4
    first.send_signal(signal.SIGKILL)
    first.wait()
    # Ray's own agents look for their parent now and then
    assert until(lambda: not ours(short_tmp), 120), [
        Path(f"/proc/{pid}/cmdline").read_bytes()[:80] for pid in ours(short_tmp)
    ]
    before = set(os.listdir(short_tmp))
    again = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400
    )
    assert again.returncode == 0 and "resumed at step" in again.stdout + again.stderr, (
        again.stdout + again.stderr
    )
    assert until(lambda: not ours(short_tmp), 120)
    assert {name for name in set(os.listdir(short_tmp)) - before if name.startswith("rf")} == set()
    here = subprocess.run(
        [*command[:-2], "run.dir=here"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert here.returncode == 0, here.stderr
    assert store.digest_run(tmp_path / "run") == store.digest_run(tmp_path / "here")


def test_a_machine_that_goes_is_survived(tiny_dir: str, tmp_path: Path) -> None:
    """Two machines that could train; the trainer's is removed in the middle of a step.

    The run moves to the other and comes out the same.
    """
    from reinforge.cluster.connect import ray

    cluster_utils = pytest.importorskip("ray.cluster_utils")
    small = {"object_store_memory": 100 << 20}
    nodes = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **small})
    try:
        workers = {
            node.node_id: node for node in (nodes.add_node(num_cpus=2, **small) for _ in range(2))
        }
        ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
        where: list[str] = []

        def go() -> None:
            from helpers.open_clusters import open_cluster

            cluster = open_cluster()
            assert cluster is not None
            where.append(cluster.worker_groups["policy"].where[0].node)
            nodes.remove_node(workers[where[0]], allow_graceful=False)

        def config(name: str, *overrides: str) -> Any:
            return make_config(
                tiny_dir, tmp_path, name, "grpo", "run.checkpoint.every=1", *overrides
            )

        there = config("there", *FAST, "cluster.trainer.cpus=2")
        launch(there, Hurting(6, go))
        here = config("here")
        launch(here, plain)
        assert digest(there) == digest(here)
        assert [
            e["role"] for e in lines(there, "events.jsonl") if e["kind"] == "actor_restored"
        ] == ["policy"]
    finally:
        ray.shutdown()
        nodes.shutdown()


@pytest.mark.long
def test_one_of_three_machines_goes(tiny_dir: str, tmp_path: Path) -> None:
    """A rank of FSDP2 on each; the run goes on with three ranks on the two that are left, and comes
    out as on three that stay.
    """
    from helpers.three_machines import lose_one_of_three

    found = lose_one_of_three(partial(make_config, tiny_dir, tmp_path))
    assert found["machines"] == 3 and found["recovered"] == 1
    assert found["lost"] == found["twice"] == 0 and found["samples"] == 4 * 16
    assert found["digest_equal"]


@pytest.fixture(scope="module")
def ray_is_up() -> Iterator[None]:
    with ray_cluster.one_ray():
        yield


@pytest.mark.long
def test_weights_change_while_engines_generate(ray_is_up: None) -> None:
    """Every token says which weights sampled it: some the old, then the new, and what comes after
    is what the trainer's own would say.
    """
    from reinforge.cluster.backend import RemoteBackend
    from reinforge.cluster.engine import RemoteEngine
    from reinforge.cluster.ray_cluster import RayCluster
    from reinforge.cluster.worker_group import WorkerGroup
    from reinforge.config.cluster import ClusterConfig
    from reinforge.engines.native import NativeEngine

    async def drawn(engine: Any, n: int = 4) -> list[Completion]:
        sampling = Sampling(max_new_tokens=100, ignore_eos=True)
        found = await asyncio.gather(
            *(engine.generate([3, 4, 5 + i], sampling, key=i, n=2) for i in range(n))
        )
        return [completion for group in found for completion in group]

    async def scenario(
        backend: RemoteBackend, engine: RemoteEngine
    ) -> tuple[list[Completion], list[Completion]]:
        await engine.update(backend.weights(), 0)
        under_way = asyncio.ensure_future(drawn(engine))
        await asyncio.sleep(0.05)
        batches = pack(make_samples((20, 9)), 64)
        backend.forward_backward(batches, NLLLoss(), Totals.of(batches))
        backend.step()
        await engine.update(backend.weights(), 1)
        return await under_way, await drawn(engine, 1)

    cfg = ClusterConfig(kind="ray", layout="split", engines=2)
    with RayCluster.open(cfg, "cpu", ranks=1, critic=False, rewards=0) as cluster:

        def engine_workers(i: int) -> WorkerGroup:
            workers = cluster.workers("engine", i)
            workers.make("model", ray_cluster.toy_model)
            return workers

        policy = cluster.workers("policy")
        policy.make("model", ray_cluster.toy_model)
        backend = RemoteBackend(policy, "policy", ray_cluster.toy_backend, shares=False)
        engine = RemoteEngine(
            cluster,
            [partial(engine_workers, i) for i in range(2)],
            "engine",
            ray_cluster.toy_engine,
            shares=False,
        )
        during, after = asyncio.run(scenario(backend, engine))
        trained = backend.state().tensors
    assert {v for c in during for v in c.versions} == {0, 1} and all(
        c.versions == sorted(c.versions) for c in during
    )
    assert {v for c in after for v in c.versions} == {1}
    model = ray_cluster.toy_model({})
    own = dict(model.module.named_parameters())
    for name, tensor in trained.items():
        if name.startswith("model/"):
            own[name.removeprefix("model/")].data.copy_(tensor)
    expected = asyncio.run(drawn(NativeEngine(model, kv_gib=0.01), 1))
    assert [c.tokens for c in expected] == [c.tokens for c in after] and [
        c.logprobs for c in expected
    ] == [c.logprobs for c in after]


@pytest.mark.long
def test_what_a_lost_engine_held_is_asked_of_the_others(ray_is_up: None) -> None:
    """Of two engines one is killed with requests in its hands, and its replacement takes 15 s to
    load. Nobody waits for that, and the answers are those of an undisturbed engine.
    """
    from reinforge.cluster.engine import RemoteEngine
    from reinforge.cluster.ray_cluster import RayCluster
    from reinforge.cluster.worker_group import WorkerGroup
    from reinforge.config.cluster import ClusterConfig
    from reinforge.engines.native import NativeEngine

    async def drawn(engine: Any) -> list[Completion]:
        sampling = Sampling(max_new_tokens=60, ignore_eos=True)
        found = await asyncio.gather(
            *(engine.generate([3, 4, 5 + i], sampling, key=i) for i in range(6))
        )
        return [completion for group in found for completion in group]

    made: list[int] = []

    async def hurt(engine: RemoteEngine) -> tuple[list[Completion], float]:
        under_way = asyncio.ensure_future(drawn(engine))
        while engine.replicas[1].load < 3:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        assert [replica.load for replica in engine.replicas] == [3, 3]
        os.kill(engine.replicas[1].workers.where[0].pid, signal.SIGKILL)
        began = time.monotonic()
        found = await under_way
        seconds = time.monotonic() - began
        assert engine.replicas[1].lost and len(made) == 2
        while engine.replicas[1].lost:
            await asyncio.sleep(0.1)
        assert len(await drawn(engine)) == 6 and len(made) == 3
        return found, seconds

    cfg = ClusterConfig(kind="ray", layout="split", engines=2)
    with RayCluster.open(cfg, "cpu", ranks=1, critic=False, rewards=0) as cluster:

        def engine_workers(i: int) -> WorkerGroup:
            if len(made) == 2:
                time.sleep(15)
            made.append(i)
            workers = cluster.workers("engine", i)
            workers.make("model", ray_cluster.toy_model)
            return workers

        engine = RemoteEngine(
            cluster,
            [partial(engine_workers, i) for i in range(2)],
            "engine",
            ray_cluster.toy_engine,
            shares=False,
            reroutes=True,
        )
        for replica in engine.replicas:
            replica.workers.apply("engine", ray_cluster.slow_passes)
        found, seconds = asyncio.run(hurt(engine))
        events = [(e["kind"], e.get("requests")) for e in cluster.events]
    assert seconds < 10
    assert events == [("actor_lost", None), ("requests_rerouted", 3), ("actor_restored", None)]
    want = asyncio.run(drawn(NativeEngine(ray_cluster.toy_model({}), kv_gib=0.01)))
    assert [c.tokens for c in found] == [c.tokens for c in want]


def test_rollouts_ahead_of_training(ray_is_up: None, tiny_dir: str, tmp_path: Path) -> None:
    """Engines that generate for the next step while this one is trained: every prompt once, and no
    token older than the bound.
    """
    cfg = make_config(
        tiny_dir,
        tmp_path,
        "run",
        "grpo",
        *FAST,
        "cluster.layout=split",
        "rollout.staleness=1",
        "train.steps=4",
        "run.log.samples_every=1",
        "run.log.samples=99",
    )
    launch(cfg, plain)
    metrics = [line for line in lines(cfg) if "rollout/staleness" in line]
    assert len(metrics) == 4 and max(line["rollout/staleness"] for line in metrics) == 1.0
    uids = [line["uid"] for line in lines(cfg, "samples.jsonl")]
    assert len(uids) == len(set(uids)) == 4 * 16


def test_what_cannot_be_placed_is_refused(ray_is_up: None, tiny_dir: str, tmp_path: Path) -> None:
    cfg = make_config(tiny_dir, tmp_path, "run", "grpo", *FAST, "cluster.trainer.cpus=999")
    with pytest.raises(InputError, match=r"the layout needs 999 CPU, and the cluster has"):
        launch(cfg, plain)
    cfg = make_config(tiny_dir, tmp_path, "run", "grpo", *FAST, "cluster.trainer.gpus=1")
    with pytest.raises(InputError, match=r"the layout needs 1 GPU, and the cluster has 0"):
        launch(cfg, plain)
