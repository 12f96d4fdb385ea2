"""FSDP on a GPU with one rank: what several CPU processes cannot show (nccl, pinned host memory,
device placement).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from helpers.split_backends import LENGTHS, load, policy_loss
from helpers.toys import make_model, make_samples, relative, tokens_of, train_config
from reinforge.backends.distributed.ranks import Ranks
from reinforge.backends.fsdp.backend import FsdpBackend
from reinforge.checkpoint import store
from reinforge.cluster.data_parallel import DataParallelEngine
from reinforge.core.batch import Totals, pack
from reinforge.core.engine import Sampling
from reinforge.core.weights import Weights
from reinforge.engines.native import NativeEngine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.fixture(scope="module")
def one() -> Iterator[Ranks]:
    with Ranks.open(1, "cuda") as opened:
        yield opened


def trained(
    ranks: Ranks, kind: str, compiled: bool = False, **changes: Any
) -> tuple[FsdpBackend, list[dict[str, float]]]:
    cfg = train_config(backend="fsdp", learning_rate=1e-3, **changes)
    backend = FsdpBackend(
        ranks,
        partial(load, kind),
        cfg,
        full=load(kind),
        sharded=True,
        compiled=compiled,
        total_steps=10,
        temperature=0.8,
        reference=True,
    )
    told = []
    for seed in range(3):
        batches = pack(make_samples(LENGTHS, seed), 64, share=True)
        backend.annotate(batches, policy_loss().needs)
        told.append(
            {
                **backend.forward_backward(batches, policy_loss(), Totals.of(batches, 32)),
                **backend.step().metrics(),
            }
        )
    return backend, told


@pytest.mark.parametrize("kind", ["head", "bfloat16", "checkpointed"])
def test_weights_in_host_memory_train_alike(one: Ranks, tmp_path: Path, kind: str) -> None:
    plain, first = trained(one, kind)
    moved, second = trained(one, kind, offload_weights=True)
    exact = kind != "bfloat16"
    for a, b in zip(first, second, strict=True):
        assert b == pytest.approx(a, rel=1e-3 if exact else 0.1, abs=1e-5 if exact else 0.05)
    pieces = moved.worker.optimizer.parameters
    assert all(
        p.device.type == "cpu"
        for name, p in pieces.items()
        if name not in moved.worker.optimizer.whole
    )
    saved = [
        dict(store.load(store.save(tmp_path / name, 1, b.state(), {}))[0].tensors)
        for name, b in (("a", plain), ("b", moved))
    ]
    weights = [k for k in saved[0] if k.startswith("model/")]
    assert relative({k: saved[1][k] for k in weights}, {k: saved[0][k] for k in weights}) < (
        1e-4 if exact else 1e-2
    )
    before = {k: t.clone() for k, t in saved[1].items()}
    moved.load(store.load(store.steps(tmp_path / "b")[0])[0])
    again = dict(store.load(store.save(tmp_path / "c", 1, moved.state(), {}))[0].tensors)
    assert all(torch.equal(again[k], before[k]) for k in before)
    plain.close(), moved.close()


@pytest.mark.parametrize("kind", ["full", "bfloat16"])
def test_compiled_layers_train_alike(one: Ranks, kind: str) -> None:
    """Layers that FSDP2 gathers, fused by the compiler: losses, gradient norms and moments of those
    that are not.
    """
    plain, first = trained(one, kind)
    counters["stats"].clear()
    fused, second = trained(one, kind, compiled=True)
    assert counters["stats"]["unique_graphs"] >= 2  # of a layer, before attention and after
    exact = kind != "bfloat16"
    for a, b in zip(first, second, strict=True):
        assert b == pytest.approx(a, rel=1e-3 if exact else 0.1, abs=1e-5 if exact else 0.05)
    moments = [
        {k: t for k, t in b.worker.optimizer.tensors().items() if k.endswith("/exp_avg")}
        for b in (fused, plain)
    ]
    assert relative(*moments) < (1e-4 if exact else 0.1)
    plain.close(), fused.close()


def test_rollouts_through_the_ranks_engine(one: Ranks) -> None:
    def engine() -> NativeEngine:
        model = make_model("llama")
        model.module.cuda()
        return NativeEngine(model, kv_gib=0.01, context=128)

    own = engine()
    alone = engine()
    spread = DataParallelEngine(one, own, engine)

    async def work() -> None:
        await spread.update(Weights("shared", module=own.model.module), 1)
        for _ in range(2):
            asked = [tokens_of(4 + i, i) for i in range(4)]
            found = [
                await asyncio.gather(
                    *(e.generate(t, Sampling(12), key=i, n=2) for i, t in enumerate(asked))
                )
                for e in (spread, alone)
            ]
            assert [c.tokens for g in found[0] for c in g] == [
                c.tokens for g in found[1] for c in g
            ]
            await spread.sleep()

    asyncio.run(work())
