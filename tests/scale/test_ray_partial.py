"""Rollouts that go on in the next step, by engines in actors: every prompt is trained once, no
token is older than the bound, and what was told of an answer outlives the actor that wrote it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import ray_cluster
from helpers.ray_cluster import FAST, Hurting, kill, need_ray, plain
from helpers.tiny_runs import launch, lines, make_config
from reinforge.build.served import trainer_score
from reinforge.core.engine import Completion, Sampling
from reinforge.core.sample import Group
from reinforge.engines.resumable import ResumableRequests
from reinforge.loops.rl import RLTrainer

need_ray()
pytestmark = pytest.mark.timeout(600)

STEPS = 5
PARTIAL = (
    *FAST,
    "rollout.partial=true",
    "rollout.staleness=2",
    "rollout.max_new_tokens=24",
    "rollout.max_batch=6",
    "sampling.over_provision=1.5",
    f"train.steps={STEPS}",
    "run.checkpoint.every=1",
    "run.log.samples_every=1",
    "run.log.samples=99",
)


@pytest.fixture(scope="module")
def ray_is_up() -> Iterator[None]:
    with ray_cluster.one_ray():
        yield


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    """The groups that the runs of a test train, those of steps that are done again twice."""
    found: list[Group] = []
    pack = RLTrainer._pack

    def packing(trainer: RLTrainer, groups: list[Group]) -> Any:
        found.extend(groups)
        return pack(trainer, groups)

    monkeypatch.setattr(RLTrainer, "_pack", packing)
    return found


def check(cfg: Any, trained: list[Group]) -> None:
    """Nothing lost, nothing twice, nothing too old, and something was carried over."""
    told = lines(cfg)
    assert [line["step"] for line in told] == list(range(1, STEPS + 1))
    assert max(line["rollout/staleness/max"] for line in told) <= 2
    assert sum(line["rollout/carried"] for line in told) > 0
    assert all(m["tokens/sampled"] == m["tokens/trained"] + m["tokens/dropped"] for m in told)
    uids = [line["uid"] for line in lines(cfg, "samples.jsonl")]
    assert len(uids) == len(set(uids)) == STEPS * 16
    samples = [s for g in trained for s in g.samples]
    mixed = 0
    for s in samples:
        versions = s.versions[s.trained].tolist()
        assert versions == sorted(versions) and versions[-1] - versions[0] <= 2
        mixed += len(set(versions)) > 1
    assert mixed, "no answer was cut"


@pytest.mark.long
def test_engines_and_trainers_die_under_partial_rollouts(
    ray_is_up: None, tiny_dir: str, tmp_path: Path, trained: list[Group]
) -> None:
    """An engine is killed while answers are written, and later the trainer: the run goes on from a
    checkpoint that holds what is under way.
    """
    cfg = make_config(
        tiny_dir, tmp_path, "run", "grpo", *PARTIAL, "cluster.layout=split", "cluster.engines=2"
    )
    first, second = Hurting(6, kill("engine-0")), Hurting(14, kill("policy"))

    def reward(completions: list[str], **named: Any) -> list[float]:
        first(completions)
        return second(completions)

    reward.__module__ = "nowhere"  # in the controller
    launch(cfg, reward)
    check(cfg, trained)
    restored = [e["role"] for e in lines(cfg, "events.jsonl") if e["kind"] == "actor_restored"]
    assert sorted(restored) == ["engine-0", "policy"]


@pytest.mark.parametrize("layout", ["split", pytest.param("colocated", marks=pytest.mark.long)])
def test_engines_in_actors(
    ray_is_up: None, tiny_dir: str, tmp_path: Path, trained: list[Group], layout: str
) -> None:
    """With actors of their own, and in the trainer's."""
    cfg = make_config(tiny_dir, tmp_path, "run", "grpo", *PARTIAL, f"cluster.layout={layout}")
    launch(cfg, plain)
    check(cfg, trained)


@pytest.mark.long
def test_what_a_lost_engine_had_told_goes_on_at_another(ray_is_up: None) -> None:
    """Of two engines one is killed in the middle of its answers. Their tokens so far stay, the rest
    is written by the other without waiting for the replacement.
    """
    from reinforge.cluster.engine import RemoteEngine
    from reinforge.cluster.ray_cluster import RayCluster
    from reinforge.cluster.worker_group import WorkerGroup
    from reinforge.config.cluster import ClusterConfig

    length = 60
    sampling = Sampling(max_new_tokens=length, ignore_eos=True)

    async def scenario(engine: RemoteEngine) -> tuple[dict[str, Any], list[list[Completion]]]:
        requests = ResumableRequests(engine)
        under_way = [
            asyncio.ensure_future(
                requests.engine_of(str(i)).generate([3, 4, 5 + i], sampling, key=i, n=2)
            )
            for i in range(4)
        ]
        while requests.tokens() < 8 * 5:
            await asyncio.sleep(0.01)
        assert [replica.load for replica in engine.replicas] == [4, 4]
        os.kill(engine.replicas[1].workers.where[0].pid, signal.SIGKILL)
        began = time.monotonic()
        while engine.replicas[0].load < 8:
            await asyncio.sleep(0.01)
        told = requests.copied()
        seconds = time.monotonic() - began
        assert seconds < 10 and engine.replicas[1].lost, seconds
        return told, await asyncio.gather(*under_way)

    cfg = ClusterConfig(kind="ray", layout="split", engines=2)
    with RayCluster.open(cfg, "cpu", ranks=1, critic=False, rewards=0) as cluster:

        def engine_workers(i: int) -> WorkerGroup:
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
        told, found = asyncio.run(scenario(engine))
        events = [(e["kind"], e.get("requests")) for e in cluster.events]
    assert events[:2] == [("actor_lost", None), ("requests_rerouted", 2)]
    score = trainer_score(ray_cluster.toy_model({}))
    for i, completions in enumerate(found):
        [request] = told[str(i)].values()
        for before, done in zip(request.completions, completions, strict=True):
            assert 0 < len(before.tokens) < length
            assert done.tokens[: len(before.tokens)] == before.tokens
            assert len(done.tokens) == length and set(done.versions) == {0}
            want = score([3, 4, 5 + i, *done.tokens])[3:]
            assert torch.allclose(torch.tensor(done.logprobs), want, atol=1e-5)
