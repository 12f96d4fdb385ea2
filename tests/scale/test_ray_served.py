"""Engines over servers in actors of Ray: the actors hold no weights, their servers get the
trainer's and prove it, and what a dead server held is asked of another actor.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import ray_cluster
from helpers.ray_cluster import FAST, Hurting, need_ray
from helpers.stub_servers import StubServers, bigram, stub_of
from helpers.tiny_runs import launch, lines, make_config
from helpers.vllm_python import START, vllm_python
from reinforge.core.engine import Completion, Sampling
from reinforge.core.errors import WeightMismatch
from reinforge.engines.served.engine import ServedEngine
from reinforge.models.causal import CausalModel

need_ray()
pytestmark = pytest.mark.timeout(600)
SPLIT = (*FAST, "cluster.layout=split", "cluster.engines=2", "rollout.engine=sglang")
WIDE = 40_000  # of the MLP: 31 MB of weights, which the bigrams of the stub never look at


@pytest.fixture(scope="module", autouse=True)
def ray_is_up() -> Iterator[None]:
    with ray_cluster.one_ray():
        yield


# ---- in actors ----


def table_of(model: CausalModel) -> torch.Tensor:
    return model.module.get_input_embeddings().weight.detach().clone()  # type: ignore[operator]


def make_score(objects: dict[str, Any]) -> Any:
    """The trainer's log-probs, were it the bigram model that the stub is."""
    return lambda tokens: bigram(table_of(objects["model"]), tokens)


def train(model: CausalModel, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        weight = model.module.get_input_embeddings().weight  # type: ignore[operator]
        weight.add_(torch.randn(*weight.shape) * 0.05)


def tensor_bytes(_: Any) -> int:
    """Of all tensors that are alive in this process."""
    gc.collect()
    found = [o for o in gc.get_objects() if isinstance(o, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in found)


def private_bytes(_: Any) -> int:
    """Memory that is this process's own."""
    [line] = [x for x in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in x]
    return 1024 * int(line.split()[1])


def server_of(engine: ServedEngine) -> tuple[int, str, str | None]:
    """Its process, address and key."""
    [replica] = engine.replicas
    assert replica.process is not None and replica.http is not None
    return replica.process.pid, replica.http.address, replica.http.key


def spoil_next(engine: ServedEngine) -> None:
    """One of the next weights is written wrong for the servers."""
    pairs = engine.transfer.pairs

    def spoiled(weights: Any) -> Any:
        engine.transfer.pairs = pairs  # type: ignore[method-assign]
        return ((n, t + 0.3 if "embed" in n else t) for n, t in pairs(weights))

    engine.transfer.pairs = spoiled  # type: ignore[method-assign]


# ---- two engines over stubs ----


def engine_of(servers: StubServers) -> dict[str, Any]:
    return {"env": servers.setup().cfg.env, "start_seconds": 120}


class Served:
    """A trainer in an actor, and two engine actors with a stub of SGLang each, as a run makes
    them; but for the proof, since the stub is no Llama.
    """

    def __init__(self, folder: Path, tokenizer: Any, cluster: Any):
        from reinforge.build.inputs import ModelInputs
        from reinforge.build.ray import RayFactories
        from reinforge.cluster.actor import SCORE

        self.folder = folder
        self.servers = StubServers(
            stub_of("sglang"), folder, intermediate_size=WIDE, vocab_size=len(tokenizer)
        )
        tokenizer.save_pretrained(self.servers.model)
        cfg = make_config(
            str(self.servers.model), folder, "run", "grpo", *SPLIT, engine=engine_of(self.servers)
        )
        inputs = ModelInputs(cfg, False, context=128, stop_tokens=frozenset(), longest=64)
        self.cluster = cluster
        factories = RayFactories(cluster)
        policy = factories.make_policy(inputs)
        self.backend: Any = factories.make_backend(
            inputs, policy, steps=9, temperature=1.0, reference=None
        )
        self.engine: Any = factories.make_engine(inputs, policy)
        self.trainer = cluster.workers("policy")
        self.trainer.make(SCORE, make_score)
        self.version = -1

    async def update(self, seed: int) -> torch.Tensor:
        """A step of the trainer; returns its embedding."""
        self.trainer.apply("model", train, seed)
        self.version += 1
        await self.engine.update(self.backend.weights(), self.version)
        found: torch.Tensor = self.trainer.apply("model", table_of)
        return found

    async def draw(self, n: int = 6) -> list[Completion]:
        sampling = Sampling(max_new_tokens=24, ignore_eos=True)
        found = await asyncio.gather(
            *(self.engine.generate([3, 4, 5 + i], sampling, key=i) for i in range(n))
        )
        return [completion for group in found for completion in group]

    def there(self, i: int, function: Any) -> Any:
        return self.engine.replicas[i].workers.apply("engine", function)

    def held(self, i: int) -> int:
        """Requests in the middle of an answer, as the server says."""
        _, address, key = self.there(i, server_of)
        asked = urllib.request.Request(
            f"{address}/stub", b"{}", {"authorization": f"Bearer {key}"}, method="POST"
        )
        with urllib.request.urlopen(asked, timeout=10) as reply:
            return int(json.load(reply)["held"])

    def events(self, since: int) -> list[tuple[str, str]]:
        return [(e["kind"], e["role"]) for e in self.cluster.events[since:]]


class TestTwoEngines:
    @pytest.fixture(scope="class")
    def served(self, tiny_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
        from transformers import AutoTokenizer

        from reinforge.cluster.ray_cluster import RayCluster
        from reinforge.config.cluster import ClusterConfig

        cfg = ClusterConfig(kind="ray", layout="split", engines=2)
        with RayCluster.open(cfg, "cpu", ranks=1, critic=False, rewards=0) as cluster:
            tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
            yield Served(tmp_path_factory.mktemp("served"), tokenizer, cluster)

    def test_actors_hold_no_weights_and_their_servers_have_the_trainers(
        self, served: Served
    ) -> None:
        async def work() -> None:
            await served.update(0)
            private = [served.there(i, private_bytes) for i in range(2)]
            for seed in (1, 2):
                table = await served.update(seed)
                assert served.engine.measured["weights/probe_error"] < 1e-5
                drawn = await served.draw()
                for i, completion in enumerate(drawn):
                    tokens = [3, 4, 5 + i, *completion.tokens]
                    want = bigram(table, tokens)[3:]
                    assert (want - torch.tensor(completion.logprobs)).abs().max() < 1e-4
                    assert set(completion.versions) == {seed}
            grown = [served.there(i, private_bytes) - private[i] for i in range(2)]
            assert max(grown) < weights / 4, (grown, weights)

        weights = sum(p.numel() * 4 for p in served.servers.module.parameters())
        assert weights > 30e6
        asyncio.run(work())
        assert served.trainer.apply("model", tensor_bytes) >= weights
        for i in range(2):
            assert served.there(i, tensor_bytes) < 1e5

    def test_what_a_dead_server_held_is_asked_of_the_other_actor(self, served: Served) -> None:
        """Its new server does not start for as long as we like, and nobody waits for it."""
        engine = served.engine
        since = len(served.cluster.events)

        async def work() -> None:
            await served.update(3)
            want = await served.draw()
            engine.router.forget()
            served.servers.hold.touch()
            under_way = asyncio.ensure_future(served.draw())
            while [served.held(i) for i in range(2)] != [3, 3]:
                await asyncio.sleep(0.05)
            served.servers.slow.touch()
            os.kill(served.there(1, server_of)[0], signal.SIGKILL)
            began = time.monotonic()
            while served.held(0) != 6:
                await asyncio.sleep(0.02)
            assert time.monotonic() - began < 10
            served.servers.hold.unlink()
            found = await under_way
            assert time.monotonic() - began < 10
            assert [c.tokens for c in found] == [c.tokens for c in want]
            assert engine.replicas[1].without_server is not None
            # what comes now goes to the other one, too
            await served.draw()
            assert served.events(since) == [
                ("servers_lost", "engine-1"),
                ("requests_rerouted", "engine-1"),
            ]
            assert served.cluster.events[since + 1]["requests"] == 3

        async def back() -> None:
            """In another event loop: that it is back is heard there, too."""
            served.servers.slow.unlink()
            await served.draw()
            while engine.replicas[1].without_server is not None:
                await asyncio.sleep(0.05)
            engine.router.forget()
            served.servers.hold.touch()
            under_way = asyncio.ensure_future(served.draw())
            while sum(served.held(i) for i in range(2)) != 6:
                await asyncio.sleep(0.05)
            assert served.held(1) > 0
            served.servers.hold.unlink()
            assert {v for c in await under_way for v in c.versions} == {served.version}

        asyncio.run(work())
        asyncio.run(back())
        assert served.events(since)[2:] == [("servers_restored", "engine-1")]

    def test_each_actor_has_a_log_of_its_own(self, served: Served) -> None:
        """Under the name that events call it by, with what its server said and nothing else."""
        logs = sorted(path.name for path in served.folder.glob("run/*.log"))
        assert logs == ["engine-0-0.log", "engine-1-0.log"]
        for i in range(2):
            address = served.there(i, server_of)[1]
            said = (served.folder / "run" / f"engine-{i}-0.log").read_text()
            assert address in said, said

    def test_a_wrong_weight_is_noticed(self, served: Served) -> None:
        served.there(1, spoil_next)
        with pytest.raises(WeightMismatch, match="some weights did not arrive"):
            asyncio.run(served.update(4))


# ---- runs ----


def held_by_engines(found: list[int]) -> None:
    """Bytes of tensors in the engines' actors of the run that is open."""
    from helpers.open_clusters import open_cluster

    cluster = open_cluster()
    assert cluster is not None
    groups = cluster.worker_groups
    found += [groups[f"engine-{i}"].apply("engine", tensor_bytes) for i in range(2)]


@pytest.mark.long
@pytest.mark.parametrize("backend", [(), ("train.backend=fsdp", "train.ranks=2")])
def test_a_run_whose_engines_load_nothing(
    tiny_dir: str, tmp_path: Path, backend: tuple[str, ...]
) -> None:
    """From its first step to its last. The proof is told to accept a stub that is no Llama."""
    servers = StubServers(stub_of("sglang"), tmp_path)
    found: list[int] = []
    cfg = make_config(
        tiny_dir,
        tmp_path,
        "run",
        "grpo",
        *SPLIT,
        *backend,
        "train.steps=2",
        engine={**engine_of(servers), "tolerance": 1e9},
    )
    launch(cfg, Hurting(2, partial(held_by_engines, found)))
    assert len(found) == 2 and max(found) < 1e5
    measured = [line for line in lines(cfg) if "weights/probe_error" in line]
    assert len(measured) == 2 and all(line["engine/restarts"] == 0 for line in measured)


@pytest.mark.long
@pytest.mark.timeout(3 * START)
@pytest.mark.parametrize("adapter", [None, {"kind": "lora", "rank": 4}], ids=["full", "lora"])
def test_vllm_in_an_actor_of_its_own(tmp_path: Path, adapter: dict[str, Any] | None) -> None:
    """The real server: every update is proved against log-probs that the trainer's actor sent."""
    from reinforge.models.tiny import make_tiny_model

    model = make_tiny_model(
        tmp_path / "model", width=64, layers=2, heads=2, kv_heads=1, context=256, spread=0.08
    )
    found: list[int] = []

    def look() -> None:
        from helpers.open_clusters import open_cluster

        cluster = open_cluster()
        assert cluster is not None
        found.append(cluster.worker_groups["engine-0"].apply("engine", tensor_bytes))

    cfg = make_config(
        str(model),
        tmp_path,
        "run",
        "grpo",
        *FAST,
        "cluster.layout=split",
        "rollout.engine=vllm",
        "train.steps=3",
        engine={"python": vllm_python(), "start_seconds": START},
        **({} if adapter is None else {"adapter": adapter}),
    )
    launch(cfg, Hurting(2, look))
    assert found and max(found) < 1e5
    measured = [line for line in lines(cfg) if "weights/probe_error" in line]
    assert len(measured) == 3
    assert all(line["weights/probe_error"] < 1e-4 for line in measured)
    assert all(line["mismatch/mean"] < 1e-4 for line in measured)
