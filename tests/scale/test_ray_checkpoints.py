"""Checkpoints of ranks that are actors: each writes its own part where it is, and nothing of it
passes through the controller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import ray_cluster
from helpers.ray_cluster import FAST, need_ray
from helpers.tiny_runs import digest, launch, lines, make_config, tensors
from reinforge.backends.distributed.ranks import Ranks
from reinforge.backends.fsdp.backend import FsdpBackend
from reinforge.build.policy import load_for_rank
from reinforge.checkpoint import store
from reinforge.cluster import worker_group
from reinforge.cluster.transport import Payload
from reinforge.config.schema import Config
from reinforge.loops.checkpointer import Checkpointer

need_ray()
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", autouse=True)
def ray_is_up() -> Iterator[None]:
    with ray_cluster.one_ray():
        yield


@pytest.fixture
def setup(tiny_dir: str, tmp_path: Path) -> Callable[..., Config]:
    def made(name: str, *overrides: str) -> Config:
        return make_config(tiny_dir, tmp_path, name, "sft", *FAST, "train.steps=2", *overrides)

    return made


class Traffic:
    """Counts the bytes that the controller sends to actors and gets from them while it saves a
    checkpoint, and while it restores one.
    """

    def __init__(self, patch: pytest.MonkeyPatch):
        self.now = ""
        self.bytes = {"save": 0, "restore": 0}
        pack, unpack = worker_group.pack, worker_group.unpack
        patch.setattr(worker_group, "pack", lambda value: self._count(pack(value)))
        patch.setattr(
            worker_group, "unpack", lambda payload, **kw: unpack(self._count(payload), **kw)
        )
        for name in self.bytes:
            patch.setattr(Checkpointer, name, self._watched(name, getattr(Checkpointer, name)))

    def _count(self, payload: Payload) -> Payload:
        if self.now:
            self.bytes[self.now] += len(payload.data) + sum(b.nbytes for b in payload.buffers)
        return payload

    def _watched(self, name: str, method: Any) -> Any:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.now = name
            try:
                return method(*args, **kwargs)
            finally:
                self.now = ""

        return watched


def size_of(cfg: Config) -> int:
    return sum(t.numel() * t.element_size() for t in tensors(cfg).values())


def newest(cfg: Config) -> Path:
    found = store.latest(Path(cfg.run.dir))
    assert found is not None
    return found


def test_states_stay_with_the_ranks(
    setup: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same checkpoint as one that the controller writes, for a hundredth of the traffic (what
    is left are names). The run continues from it, and three ranks hold the same weights and
    moments, bit for bit.
    """
    ranks = ("train.backend=fsdp", "train.ranks=2", "train.ema=0.9")
    traffic = Traffic(monkeypatch)
    launch(setup("pieces", *ranks, "train.steps=1"))
    pieces = setup("pieces", *ranks)
    launch(pieces)
    few = dict(traffic.bytes)
    there = newest(pieces)
    files = {p.name for p in there.iterdir()}
    assert {"model-r00000.safetensors", "optimizer-r00001.safetensors"} <= files
    assert {"part-part.ema-r00000.safetensors", "part-part.ema-r00001.safetensors"} <= files
    size = size_of(pieces)
    assert 0 < few["save"] < size / 50 and 0 < few["restore"] < size / 10

    whole = setup("whole", *ranks, "run.checkpoint.sharded=false")
    launch(whole)
    assert traffic.bytes["save"] - few["save"] > size
    assert digest(whole) == digest(pieces)

    state, _ = store.load(there)
    wanted = {name: tensor for name, tensor in state.tensors.items() if name[:5] != "part/"}
    with Ranks.open(3, "cpu") as three:
        load = partial(load_for_rank, pieces, scores=False, value_head=False)
        backend = FsdpBackend(three, load, pieces.train, total_steps=4)
        backend.load(state)
        found = backend.state().tensors
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_what_can_only_be_gathered_is_written_by_the_first_rank(
    setup: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("deepspeed")
    cfg = setup("run", "train.backend=deepspeed", "train.ranks=2")
    traffic = Traffic(monkeypatch)
    launch(setup("run", "train.backend=deepspeed", "train.ranks=2", "train.steps=1"))
    launch(cfg)
    assert "model-r00000.safetensors" in {p.name for p in newest(cfg).iterdir()}
    assert max(traffic.bytes.values()) < size_of(cfg) / 20
    assert [line["step"] for line in lines(cfg)] == [1, 2]
