"""The pieces behind actors that need no Ray: what is sent, where actors go, how requests are handed
in, what memory keeps.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from helpers.toys import make_model, make_samples
from reinforge.checkpoint.memory_snapshot import MemorySnapshot
from reinforge.cluster.environment import forwarded
from reinforge.cluster.mailbox import Mailbox, MailboxRequest
from reinforge.cluster.placement import ActorPlacement, plan, rank_order, ranks_for
from reinforge.cluster.tensors import buckets_of, fingerprint, put_into, trained_of
from reinforge.cluster.transport import LARGE, pack, unpack
from reinforge.config.cluster import ClusterConfig
from reinforge.core.backend import State
from reinforge.core.batch import pack as packs
from reinforge.core.engine import Sampling
from reinforge.core.errors import InputError
from reinforge.core.weights import Weights
from reinforge.engines.native import NativeEngine


def test_a_parcel_gives_back_what_went_in() -> None:
    large = torch.arange(LARGE, dtype=torch.float32)
    given = {
        "a": large,
        "b": torch.randn(3, 5).bfloat16(),
        "c": torch.zeros(0),
        "d": torch.tensor(7),
        "e": torch.tensor([True, False]),
    }
    payload = pack(given)
    assert (
        len(payload.buffers) == 1
        and payload.buffers[0].nbytes == 4 * LARGE
        and len(payload.data) < LARGE
    )
    for views in (False, True):
        found = unpack(payload, views=views)
        assert all(
            torch.equal(found[k], given[k]) and found[k].dtype == given[k].dtype for k in given
        )
        # a copy may be written, a view is the store's own
        assert (found["a"].data_ptr() == large.data_ptr()) == views
    leaf = torch.ones(2, requires_grad=True)
    assert not unpack(pack([leaf]))[0].requires_grad


def test_batches_travel() -> None:
    (batch,) = packs(make_samples((20, 5, 12)), 64)
    found = unpack(pack([batch]))[0]
    assert torch.equal(found.tokens, batch.tokens) and torch.equal(
        found.streams["behaviour"], batch.streams["behaviour"]
    )
    assert [s.uid for s in found.samples] == [
        s.uid for s in batch.samples
    ] and found.lengths == batch.lengths


def test_what_cannot_travel_is_told() -> None:
    with pytest.raises(InputError, match="cannot be sent to another process"):
        pack(lambda: None)


def test_colocated_is_one_bundle_per_rank_and_rewards_share_the_first() -> None:
    made = plan(ClusterConfig(kind="ray"), ranks=2, critic=True, rewards=1, gpu=True)
    assert made.bundles == [{"CPU": 2.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}]
    assert made.places == {
        "policy": [ActorPlacement(0, 1.0, 0.5), ActorPlacement(1, 1.0, 1.0)],
        "reward": [ActorPlacement(0, 1.0, 0.5)],
    }
    assert made.needed == {"CPU": 3.0, "GPU": 2.0}


def test_split_gives_everybody_a_bundle() -> None:
    cfg = ClusterConfig.model_validate(
        {
            "kind": "ray",
            "layout": "split",
            "engines": 2,
            "strategy": "spread",
            "engine": {"cpus": 0.5, "gpus": 2},
        }
    )
    made = plan(cfg, ranks=2, critic=True, rewards=1, gpu=True)
    assert made.strategy == "SPREAD" and [
        len(made.places[r]) for r in ("policy", "engine", "critic", "reward")
    ] == [2, 2, 2, 1]
    assert sorted(p.bundle for places in made.places.values() for p in places) == list(range(7))
    assert made.needed == {"CPU": 6.0, "GPU": 9.0}
    on_cpus = plan(
        ClusterConfig(kind="ray", layout="split"), ranks=1, critic=False, rewards=0, gpu=False
    )
    assert on_cpus.bundles == [{"CPU": 1.0}, {"CPU": 1.0}]


def test_who_asks_for_devices_has_actors_of_its_own_in_both_layouts() -> None:
    """Two ranks and their critic, a reference cut over two, two teachers on half a GPU each, and a
    reward model on CPUs.
    """
    roles = {
        "critic": {"gpus": 1},
        "reference": {"gpus": 1, "ranks": 2},
        "teacher": {"gpus": 0.5, "cpus": 2},
        "reward": {"gpus": 0},
    }
    cfg = ClusterConfig.model_validate({"kind": "ray", **roles})
    beside = {"critic": True, "rewards": 1, "reference": True, "teachers": 2}
    made = plan(cfg, ranks=2, gpu=True, **beside)
    assert {role: [(p.bundle, p.gpus) for p in places] for role, places in made.places.items()} == {
        "policy": [(0, 1.0), (1, 1.0)],
        "critic": [(2, 1.0), (3, 1.0)],
        "reference": [(4, 1.0), (5, 1.0)],
        "teacher-0": [(6, 0.5)],
        "teacher-1": [(7, 0.5)],
        "reward": [(8, 0.0)],
    }
    assert made.needed == {"CPU": 11.0, "GPU": 7.0}
    # of 64 GPUs 3 are the others', and each rank brings one for its critic
    assert ranks_for(cfg, 64, **beside) == 30
    split = cfg.model_copy(update={"layout": "split", "engines": 4})
    assert plan(split, ranks=2, gpu=True, **beside).needed == {"CPU": 15.0, "GPU": 11.0}
    with pytest.raises(ValidationError, match="without gpus it is in the policy's actors"):
        ClusterConfig.model_validate({"kind": "ray", "reference": {"ranks": 2}})


def test_ranks_are_what_the_others_leave() -> None:
    split = ClusterConfig(kind="ray", layout="split", engines=24)
    assert (
        ranks_for(split, 64, critic=False, rewards=0) == 40
        and ranks_for(split, 64, critic=True, rewards=2) == 19
    )
    assert ranks_for(ClusterConfig(kind="ray"), 8, critic=True, rewards=1) == 8
    with pytest.raises(InputError, match="how many actors are to train is not said"):
        ranks_for(ClusterConfig(kind="ray"), 0, critic=False, rewards=0)


def test_ranks_go_machine_by_machine() -> None:
    """As Ray placed 24 bundles on three machines of eight."""
    machines = [0, *[1] * 8, 0, 0, 0, 2, 0, 0, 0, 0, *[2] * 7]
    nodes = [f"node-{'cab'[m]}" for m in machines]
    ips = [f"10.0.0.{(9, 10, 100)[m]}" for m in machines]
    # on each machine the last actor has the first device
    devices = [[7 - nodes[:i].count(node)] for i, node in enumerate(nodes)]
    order = rank_order(nodes, ips, devices)
    assert [machines[i] for i in order] == [0] * 8 + [1] * 8 + [2] * 8
    assert [devices[i] for i in order] == [[i] for i in range(8)] * 3
    # simulated machines have one address
    same = rank_order(nodes, ["10.0.0.1"] * 24, devices)
    assert [machines[i] for i in same] == [1] * 8 + [2] * 8 + [0] * 8


def test_actors_get_what_libraries_read_and_nothing_that_ray_decides() -> None:
    given = {
        **dict.fromkeys(
            ("NCCL_IB_HCA", "GLOO_SOCKET_IFNAME", "VLLM_X", "PYTORCH_CUDA_ALLOC_CONF"), "a"
        ),
        **dict.fromkeys(("TORCH_NCCL_TRACE_BUFFER_SIZE", "CUDA_DEVICE_ORDER", "HF_HOME"), "b"),
    }
    others = dict.fromkeys(
        ("CUDA_VISIBLE_DEVICES", "RANK", "PATH", "TORCHELASTIC_RUN_ID", "TOKENIZERS_PARALLELISM"),
        "c",
    )
    assert forwarded({**given, **others}) == {**given, "TOKENIZERS_PARALLELISM": "false"}


def test_keys_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValidationError, match="only actors of Ray have it"):
        ClusterConfig(engines=2)
    with pytest.raises(ValidationError, match="in a colocated layout the trainer generates"):
        ClusterConfig(kind="ray", engines=2)
    with pytest.raises(ValidationError, match="engine: in a colocated layout"):
        ClusterConfig.model_validate({"kind": "ray", "engine": {"gpus": 1}})
    assert ClusterConfig.model_validate(ClusterConfig().model_dump()) == ClusterConfig()


def test_weights_arrive_whole_or_not_at_all() -> None:
    source = make_model(seed=1)
    target = make_model(seed=2)
    named = trained_of(Weights("shared", module=source.module))
    mark = fingerprint(named)
    assert mark != fingerprint(trained_of(Weights("shared", module=target.module)))
    size = 4096
    parts = list(buckets_of(named.items(), size))
    assert [name for part in parts for name, _ in part] == list(named)
    assert (
        all(sum(t.numel() * 4 for _, t in part) <= size or len(part) == 1 for part in parts)
        and len(parts) > 3
    )
    put_into(target.module, dict(item for part in parts for item in part), mark)
    assert all(
        torch.equal(p, q)
        for p, q in zip(source.module.parameters(), target.module.parameters(), strict=True)
    )
    with pytest.raises(RuntimeError, match="not those that were sent"):
        put_into(target.module, {name: t + 1 for name, t in named.items()}, mark)


def test_the_head_of_a_shared_critic_stays_with_the_trainer() -> None:
    """An engine of its own has no such head, and needs none."""
    source = make_model(seed=1)
    target = make_model(seed=2)
    source.add_value_head()
    with torch.no_grad():
        for p in source.module.parameters():
            p.add_(0.01)
    named = trained_of(Weights("shared", module=source.module))
    put_into(target.module, named, fingerprint(named))
    own = dict(source.module.named_parameters())
    assert "value_head.weight" in own and all(
        torch.equal(p, own[name]) for name, p in target.module.named_parameters()
    )


def test_a_reader_that_is_gone_takes_no_reply_with_it() -> None:
    """An event loop was torn down while its collector waited: the call waits on in the actor."""

    async def work() -> None:
        mailbox = Mailbox(NativeEngine(make_model(), kv_gib=0.01))
        abandoned = asyncio.ensure_future(mailbox.take(30.0, 1))
        await asyncio.sleep(0)
        asked = MailboxRequest(0, "generate", ([3, 4], Sampling(max_new_tokens=4)), {"key": 1})
        mailbox.submit([asked], 2)
        found: list[Any] = []
        while not found:
            found = await mailbox.take(5.0, 2)
        assert [reply.number for reply in found] == [0] and await abandoned == []

    asyncio.run(work())


def test_requests_that_come_together_are_computed_together() -> None:
    """Through a mailbox the bits are those of asking the engine directly."""
    sampling = Sampling(max_new_tokens=12)

    async def direct() -> list[Any]:
        engine = NativeEngine(make_model(), kv_gib=0.01)
        return await asyncio.gather(
            *(engine.generate([3, 4, 5 + i], sampling, key=i, n=2) for i in range(3))
        )

    async def by_desk() -> list[Any]:
        mailbox = Mailbox(NativeEngine(make_model(), kv_gib=0.01))
        mailbox.cancel([3])  # overtook its request
        mailbox.submit(
            [
                MailboxRequest(i, "generate", ([3, 4, 5 + i], sampling), {"key": i, "n": 2})
                for i in range(4)
            ]
        )
        found: dict[int, Any] = {}
        while len(found) < 3:
            found |= {answer.number: answer.value for answer in await mailbox.take(5.0)}
        assert await mailbox.take(0.01) == []
        mailbox.submit([MailboxRequest(9, "generate", ([], sampling), {"key": 0})])
        (answer,) = await mailbox.take(5.0)
        assert isinstance(answer.error, InputError)
        return [found[i] for i in range(3)]

    assert asyncio.run(by_desk()) == asyncio.run(direct())


def test_memory_keeps_the_boundary_and_not_what_becomes_of_it() -> None:
    memory = MemorySnapshot(every=2)
    assert [memory.due(step) for step in range(5)] == [False, False, True, False, True]
    counters = {"updates": 2}
    running = torch.ones(3)
    memory.keep(
        2,
        State({"model/w": torch.zeros(2), "part/mean/x": running}, {"steps": 2}),
        {"step": 2, "counters": counters},
    )
    counters["updates"], running[0] = 9, 5.0
    state, extra = memory.load()
    assert (
        memory.step == 2 and extra == {"step": 2, "counters": {"updates": 2}} and not memory.due(2)
    )
    assert torch.equal(state.tensors["part/mean/x"], torch.ones(3)) and state.meta == {"steps": 2}
