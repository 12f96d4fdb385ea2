"""Runs whose workers are actors of Ray: the same samples, losses and weights as in one process,
also when workers die.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers import ray_cluster
from helpers.ray_cluster import (
    FAST,
    Hurting,
    kill,
    need_ray,
    plain,
    requests_under_way,
    slow_ranks,
)
from helpers.tiny_runs import EVAL, digest, launch, lines, make_config
from reinforge.config.schema import Config
from reinforge.core.errors import StoppedByPolicy

need_ray()
pytestmark = pytest.mark.timeout(600)
# no clocks, no machines
SAID = (
    "train/",
    "policy/",
    "reward/",
    "response/",
    "groups/",
    "tokens/",
    "mismatch/",
    "eval/",
    "critic/",
)


@pytest.fixture(scope="module", autouse=True)
def ray_is_up() -> Iterator[None]:
    with ray_cluster.one_ray():
        yield


@pytest.fixture
def setup(tiny_dir: str, tmp_path: Path) -> Callable[..., Config]:
    def made(name: str, *overrides: str, **sections: Any) -> Config:
        return make_config(
            tiny_dir,
            tmp_path,
            name,
            "grpo",
            "run.checkpoint.every=2",
            "run.log.samples_every=1",
            *overrides,
            **sections,
        )

    return made


def facts(cfg: Config, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k.startswith(SAID)} for line in lines(cfg, name)]


def samples(cfg: Config) -> list[dict[str, Any]]:
    return [
        {k: line[k] for k in ("step", "uid", "completion", "reward")}
        for line in lines(cfg, "samples.jsonl")
    ]


def events(cfg: Config, kind: str) -> list[dict[str, Any]]:
    return [e for e in lines(cfg, "events.jsonl") if e["kind"] == kind]


def run(cfg: Config, reward: Callable[..., Any] = plain) -> Config:
    launch(cfg, reward, eval_data=EVAL)
    return cfg


def test_the_same_run_bit_for_bit(setup: Callable[..., Config]) -> None:
    here = run(setup("here"))
    there = run(setup("there", *FAST))
    assert facts(there) == facts(here) and samples(there) == samples(here)
    assert digest(there) == digest(here)


def test_a_dead_trainer_is_made_again_and_the_run_comes_out_the_same(
    setup: Callable[..., Config],
) -> None:
    """Killed in the first rollout (there is no checkpoint), and again after one."""
    here = run(setup("here", "train.steps=4"))
    deaths = Hurting(2, kill("policy"))

    def again(completions: list[str], **columns: Any) -> list[float]:
        found = deaths(completions, **columns)
        if deaths.calls == 24:
            kill("policy")()
        return found

    again.__name__ = "hurting"
    there = run(setup("there", *FAST, "train.steps=4", "cluster.spares=1"), again)
    assert digest(there) == digest(here) and facts(there) == facts(here)
    lost = events(there, "actor_lost")
    restored = events(there, "actor_restored")
    assert [e["role"] for e in lost] == ["policy"] * 2 == [e["role"] for e in restored]
    assert [e["step"] for e in restored] == [0, 2]


@pytest.mark.long
def test_a_snapshot_in_memory_loses_less(setup: Callable[..., Config]) -> None:
    here = run(setup("here", "train.steps=4", "run.checkpoint.every=0"))
    there = run(
        setup("there", *FAST, "train.steps=4", "run.checkpoint.every=0", "cluster.snapshot=1"),
        Hurting(18, kill("policy")),
    )
    assert digest(there) == digest(here) and facts(there) == facts(here)
    (restored,) = events(there, "actor_restored")
    assert restored["step"] >= 1  # no checkpoint was written before the end


def test_engines_of_their_own(setup: Callable[..., Config]) -> None:
    """Of two engines one is killed with requests in its hands, and the samples are the same. (One
    engine: below, beside a critic.)
    """
    split = (*FAST, "cluster.layout=split")
    two = run(setup("two", *split, "cluster.engines=2"))
    hurt = run(setup("hurt", *split, "cluster.engines=2"), Hurting(6, kill("engine-1")))
    assert samples(hurt) == samples(two) and digest(hurt) == digest(two)
    assert (
        [e["role"] for e in events(hurt, "actor_lost")]
        == ["engine-1"]
        == [e["role"] for e in events(hurt, "actor_restored")]
    )


@pytest.mark.long
def test_a_hang_is_noticed_within_a_bound(setup: Callable[..., Config]) -> None:
    here = run(setup("here"))
    stopped: list[float] = []

    def stop() -> None:
        stopped.append(time.time())
        kill("policy", kind=signal.SIGSTOP)()

    there = run(setup("there", *FAST, "cluster.heartbeat=10"), Hurting(3, stop))
    (lost,) = events(there, "actor_lost")
    assert "no sign of life" in lost["how"] and lost["at"] - stopped[0] < 2 * 10.0 + 10
    assert digest(there) == digest(here)


@pytest.mark.long  # in make test: ranks that generate, too, below
def test_ranks_are_actors(setup: Callable[..., Config]) -> None:
    """FSDP2 over two actors is FSDP2 over two processes; a lost rank is made again with
    the others.
    """
    ranks = ("train.backend=fsdp", "train.ranks=2")
    here = run(setup("here", *ranks))
    there = run(setup("there", *FAST, *ranks), Hurting(10, kill("policy", 1)))
    assert digest(there) == digest(here)
    assert [e["role"] for e in events(there, "actor_lost")] == ["policy"]


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.long)])
def test_every_actor_generates(
    setup: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """A share each, as without Ray. One is killed with its share of a step's answers in its hands,
    and the run comes out the same.
    """
    from helpers.open_clusters import watch_clusters
    from reinforge.cluster.engine import MAILBOX, RemoteEngine

    asked = (
        *("train.backend=fsdp", "train.ranks=2", "rollout.all_ranks=true"),
        *("rollout.max_new_tokens=96", "train.steps=2", "run.checkpoint.every=1"),
    )
    here = run(setup("here", *asked))
    found: list[int] = []
    submissions = itertools.count(1)
    submit = RemoteEngine._submit

    def hurting(self: Any, replica: Any, batches: Any) -> None:
        doomed = next(submissions) == 2
        if doomed:  # the answers take two seconds then
            replica.workers.apply(self.name, slow_ranks)
        submit(self, replica, batches)
        if doomed:
            time.sleep(0.5)  # the actors go on meanwhile
            found.append(replica.workers.apply(MAILBOX, requests_under_way))
            kill("policy", rank)()

    monkeypatch.setattr(RemoteEngine, "_submit", hurting)
    watch_clusters()
    there = run(setup("there", *FAST, *asked))
    assert found == [4]
    assert samples(there) == samples(here) and facts(there) == facts(here)
    assert digest(there) == digest(here)
    (lost,) = events(there, "actor_lost")
    assert lost["role"] == "policy" and (rank == 0 or lost["how"].startswith("rank 1 (pid"))


@pytest.mark.long
def test_who_is_lost_again_and_again_ends_the_run(setup: Callable[..., Config]) -> None:
    cfg = setup("run", *FAST, "cluster.restarts=1")
    with pytest.raises(
        StoppedByPolicy, match=r"policy: .*gone for the 2nd time at step 0 \(cluster.restarts: 1\)"
    ):
        run(cfg, Hurting(1, kill("policy"), times=9))
    assert not {
        p
        for p in ray_cluster.ray_processes()
        if b"ray::Actor"
        in (Path(f"/proc/{p}/cmdline").read_bytes() if os.path.exists(f"/proc/{p}") else b"")
    }


def test_a_critic_beside_the_policy_and_apart(
    setup: Callable[..., Config], tiny_dir: str, tmp_path: Path
) -> None:
    def ppo(name: str, *overrides: str) -> Config:
        return make_config(
            tiny_dir,
            tmp_path,
            name,
            "ppo",
            "train.steps=2",
            *overrides,
            critic={"learning_rate": 1e-3},
        )

    here = run(ppo("here"))
    beside = run(ppo("beside", *FAST))
    apart = run(ppo("apart", *FAST, "cluster.layout=split"))
    assert facts(beside) == facts(here) == facts(apart)
    assert digest(beside) == digest(here) == digest(apart)
