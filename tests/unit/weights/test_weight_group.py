"""Weights through a process group, and which way is taken to which server."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from reinforge.config.engine import EngineConfig
from reinforge.engines.served.dialect import ServerSetup
from reinforge.engines.served.make import make_dialect
from reinforge.engines.served.transfer import WeightTransfer
from reinforge.weights.group import GroupChannel, GroupLink, broadcast, make_group, plan_buckets


def test_what_is_sent_arrives_in_buckets() -> None:
    """Two workers, three buckets, every kind of number."""
    torch.manual_seed(0)
    pairs = [
        ("a", torch.randn(5, 3)),
        ("b", torch.randn(7).bfloat16()),
        ("c", torch.arange(4)),
        ("d", torch.randn(2, 2)),
    ]
    channel = GroupChannel()
    channel.publish(pairs, 3)
    assert [len(places) for places, _ in channel.buckets] == [4]
    buckets = plan_buckets(pairs, most=48)
    assert [[p[0] for p in places] for places, _ in buckets] == [["a"], ["b", "c"], ["d"]]
    link = GroupLink(2, "cpu")
    found: list[dict[str, torch.Tensor]] = [{}, {}]

    def worker(rank: int) -> None:
        place = link.message()
        store = dist.TCPStore(place["address"], place["port"], place["size"], is_master=False)
        group = make_group(store, rank, place["size"], "cpu")
        for places, total in json.loads(json.dumps(buckets)):
            flat = torch.empty(total, dtype=torch.uint8)
            broadcast(group, flat)
            for name, dtype, shape, start, size in places:
                raw = flat[start : start + size].view(getattr(torch, dtype))
                found[rank - 1][name] = raw.view(shape)

    workers = [threading.Thread(target=worker, args=(rank,)) for rank in (1, 2)]
    for thread in workers:
        thread.start()
    link.join()
    link.send(channel.pairs, buckets)
    for thread in workers:
        thread.join()
    for got in found:
        assert all(torch.equal(got[name], tensor) for name, tensor in pairs)
    assert link.sent == 2 * sum(total for _, total in buckets) == 2 * (64 + 48 + 16)


def setup_of(device: str = "cpu", **options: Any) -> ServerSetup:
    return ServerSetup(
        kind="vllm",
        cfg=EngineConfig(**options),
        model="nowhere",
        folder=Path("nowhere"),
        dtype="float32",
        device=device,
        context=128,
        vocabulary=64,
        colocated=not options.get("address"),
        devices=tuple(options.get("devices", ())),
        gpu="0",
    )


def kind(**options: Any) -> str:
    return WeightTransfer(setup_of(**options), make_dialect("vllm"), None).kind


def test_a_server_on_another_host_is_sent_nothing_through_memory() -> None:
    assert kind(address=["http://127.0.0.1:8000"]) == "memory" == kind()
    assert kind(address=["http://10.1.2.3:8000"]) == "disk"
    assert kind(address=["http://localhost:1", "https://gpu7.example.com"]) == "disk"
    with pytest.raises(ValueError, match=r"10\.1\.2\.3:8000 is on another host.*use disk"):
        EngineConfig(address=["http://10.1.2.3:8000"], channel="memory")


def test_handles_are_for_one_worker_on_the_same_gpu() -> None:
    def backend(**options: Any) -> str:
        words = make_dialect("vllm").command(setup_of(channel="api", **options), "python", 1)
        return str(json.loads(words[words.index("--weight-transfer-config") + 1])["backend"])

    assert backend(device="cuda") == "ipc"
    assert backend() == "reinforge_group"
    assert backend(device="cuda", args={"tensor_parallel_size": 2}) == "reinforge_group"
    assert backend(device="cuda", devices=["1"]) == "reinforge_group"
    assert backend(device="cuda", replicas=2, devices=["0", "0"]) == "ipc"
    assert backend(device="cuda", replicas=2, devices=["0", "1"]) == "reinforge_group"
    assert "--weight-transfer-config" not in make_dialect("vllm").command(setup_of(), "python", 1)
