"""Weights of a model that four ranks hold on their way to engines: what travels, who has them
afterwards, and who computes the proof.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.collectives import ReceivedBytes
from helpers.split_backends import LENGTHS, load, update
from helpers.toys import make_samples, train_config
from reinforge.backends.distributed.ranks import Ranks
from reinforge.backends.fsdp.backend import FsdpBackend
from reinforge.backends.fsdp.worker import FsdpWorker
from reinforge.build.served import trainer_score
from reinforge.config.engine import EngineConfig
from reinforge.engines.served.dialect import ServerSetup
from reinforge.engines.served.make import make_dialect
from reinforge.engines.served.transfer import WeightTransfer
from reinforge.engines.served.vllm_plugin import from_files
from reinforge.models.causal import CausalModel
from reinforge.models.named_weights import named_weights

pytestmark = pytest.mark.timeout(600)
RANKS = 4


def counted(worker: FsdpWorker, with_copy: bool) -> tuple[int, int, float]:
    """Bytes and transfers of a gather, and the sum of the copy that this rank put it into."""
    copy = load("bfloat16", seed=5).module if with_copy else None
    worker.member.copy = copy
    with ReceivedBytes() as found:
        worker.publish()
    worker.member.copy = None
    return found.bytes, found.gathers, 0.0 if copy is None else summed(copy)


def summed(module: torch.nn.Module) -> float:
    return sum(float(p.detach().float().sum()) for p in module.parameters())


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks.open(RANKS, "cpu") as opened:
        yield opened


@pytest.fixture(scope="module")
def backend(ranks: Ranks) -> FsdpBackend:
    made = FsdpBackend(
        ranks,
        partial(load, "bfloat16"),
        train_config(learning_rate=1e-2),
        full=load("bfloat16", seed=3),
        total_steps=10,
        temperature=0.7,
    )
    update(made, make_samples(LENGTHS))
    return made


def test_a_gather_moves_two_bytes_a_weight_and_every_rank_keeps_it(backend: FsdpBackend) -> None:
    found = backend.ranks.call(backend.id, counted, [(True,)] * RANKS)
    count = sum(shape.numel() for shape in backend.worker.shapes.values())
    backend.weights()
    assert backend.full is not None
    want = summed(backend.full.module)
    for received, calls, total in found:
        assert 2.0 <= received / count <= 2.2
        assert calls == 1  # one bucket
        assert total == want


def setup(tmp_path: Path, model: CausalModel) -> ServerSetup:
    return ServerSetup(
        kind="vllm",
        cfg=EngineConfig(replicas=2),
        model="nowhere",
        folder=tmp_path,
        dtype="bfloat16",
        device="cpu",
        context=128,
        vocabulary=int(model.head.weight.shape[0]),
    )


def test_a_replica_reads_two_bytes_a_weight(backend: FsdpBackend, tmp_path: Path) -> None:
    """Written once for all of them; each finds what the ranks have."""
    model = backend.full
    assert isinstance(model, CausalModel)
    transfer = WeightTransfer(setup(tmp_path, model), make_dialect("vllm"), None)
    published = transfer.publish(backend.weights(), 1)
    want = dict(named_weights(model.module))
    count = sum(t.numel() for t in want.values())
    for _ in range(2):
        message = published.channel.message()
        found = dict(from_files(Path(message["folder"])))
        read = sum(file.stat().st_size for file in Path(message["folder"]).glob("*.bin"))
        assert 2.0 <= read / count <= 2.1
        assert found.keys() == want.keys()
        assert all(torch.equal(found[name], want[name]) for name in want)
    transfer.close()


def test_the_ranks_compute_the_proof(backend: FsdpBackend, tmp_path: Path) -> None:
    """At temperature 1, whatever the rollouts have, and with the weights that are served: the same
    as rank 0's whole model, which nobody asks.
    """
    model = backend.full
    assert isinstance(model, CausalModel)
    transfer = WeightTransfer(setup(tmp_path, model), make_dialect("vllm"), _nobody)
    first = transfer.publish(backend.weights(), 1)
    want = trainer_score(model)
    assert first.want is not None and first.ahead is not None
    assert (first.want - want(transfer.tokens(0))).abs().max() < 0.05  # bfloat16 rounds
    assert (first.ahead - want(transfer.tokens(1))).abs().max() < 0.05
    assert first.want.abs().mean() > 1 and backend.worker.temperature == 0.7
    transfer.keep(first)
    update(backend, make_samples(LENGTHS, 1))
    second = transfer.publish(backend.weights(), 2)
    assert second.number == 1 and transfer.tokens(1)[:16] != transfer.tokens(0)[:16]
    # what an engine with the old weights would say about the new probe is another thing
    assert (second.want - first.ahead).abs().mean() > 0.1  # type: ignore[operator]
    transfer.close()


def _nobody(tokens: Any) -> torch.Tensor:
    raise AssertionError("the whole model on the host was asked")


def test_where_only_an_adapter_is_trained_it_travels_alone(ranks: Ranks, tmp_path: Path) -> None:
    backend = FsdpBackend(
        ranks, partial(load, "lora"), train_config(), full=load("lora"), total_steps=10
    )
    update(backend, make_samples(LENGTHS))
    model = backend.full
    assert isinstance(model, CausalModel)
    whole = sum(t.numel() * t.element_size() for _, t in named_weights(model.module))
    gathered = backend.ranks.call(backend.id, counted, [(False,)] * RANKS)
    trained = sum(shape.numel() for shape in backend.worker.shapes.values())
    assert max(received for received, _, _ in gathered) <= 1.2 * 4 * trained < whole
    transfer = WeightTransfer(setup(tmp_path, model), make_dialect("vllm"), None)
    published = transfer.publish(backend.weights(), 1)
    assert published.channel.kind == "adapter"
    folder = Path(published.channel.message()["folder"])
    assert sum(file.stat().st_size for file in folder.glob("*.bin")) < 2 * 4 * trained
    transfer.close()
    backend.close()
