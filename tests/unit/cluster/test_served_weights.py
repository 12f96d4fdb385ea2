"""Weights for servers of other actors, without Ray: what is stored, what is sent again, and what
servers find.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from helpers.split_backends import load
from reinforge.build.served import trainer_score
from reinforge.cluster.served_weights import ServedWeights, StoredTensors, store
from reinforge.config.engine import EngineConfig
from reinforge.core.weights import Weights
from reinforge.engines.served.dialect import ServerSetup
from reinforge.engines.served.make import make_dialect
from reinforge.engines.served.transfer import WeightTransfer
from reinforge.engines.served.vllm_plugin import from_files, on_base
from reinforge.models.causal import CausalModel
from reinforge.models.named_weights import named_weights

CPU = torch.device("cpu")


class ObjectStore:
    """What Ray's is to actors."""

    def __init__(self) -> None:
        self.buckets: list[list[tuple[str, Tensor]]] = []

    def put(self, bucket: list[tuple[str, Tensor]]) -> int:
        self.buckets.append([(name, tensor.detach().clone()) for name, tensor in bucket])
        return len(self.buckets) - 1

    def get(self, ref: int) -> list[tuple[str, Tensor]]:
        return self.buckets[ref]

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for bucket in self.buckets for _, t in bucket)


def setup_for(kind: str, folder: Path, model: CausalModel, dtype: str) -> ServerSetup:
    return ServerSetup(
        kind=kind,
        cfg=EngineConfig(),
        model=str(folder),
        folder=folder,
        dtype=dtype,
        device="cpu",
        context=128,
        vocabulary=int(model.head.weight.shape[0]),
        colocated=False,
    )


@pytest.fixture
def sent(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`sent(kind, model, dtype)`: (the store, a function that stores the model's weights again and
    gives what the servers are told)."""
    opened = []

    def made(kind: str, model: CausalModel, dtype: str) -> Any:
        (tmp_path / "config.json").write_text("{}")
        setup = setup_for(kind, tmp_path, model, dtype)
        transfer = WeightTransfer(setup, make_dialect(kind), None)
        opened.append(transfer)
        objects = ObjectStore()
        last: list[ServedWeights] = []

        def send(number: int) -> Any:
            base = last[-1].base if last else None
            weights = Weights("shared", module=model.module)
            last.append(store(weights, setup, number, trainer_score(model), objects.put, base))
            published = transfer.publish(last[-1].weights(objects.get), number)
            transfer.keep(published)
            return published

        return objects, send

    yield made
    for transfer in opened:
        transfer.close()


def causal(kind: str) -> CausalModel:
    model = load(kind)
    assert isinstance(model, CausalModel)
    return model


def train(model: CausalModel) -> None:
    with torch.no_grad():
        for p in model.module.parameters():
            if p.requires_grad:
                p.add_(0.05)


@pytest.mark.parametrize("kind", ["float32", "tied"])
def test_servers_find_what_the_trainer_has(sent: Callable[..., Any], kind: str) -> None:
    """In the precision of the servers, with the log-probs that the trainer computed."""
    model = causal(kind)
    objects, send = sent("vllm", model, "bfloat16")
    for number in (4, 5):  # of a controller that has made others
        published = send(number)
        found = dict(from_files(Path(published.channel.message()["folder"])))
        want = {name: t.bfloat16() for name, t in named_weights(model.module)}
        assert found.keys() == want.keys()
        assert all(torch.equal(found[name], want[name]) for name in want)
        score = trainer_score(model)
        assert published.number == number
        assert torch.equal(published.want, score(probe(number, model)))
        assert torch.equal(published.ahead, score(probe(number + 1, model)))
        train(model)
    assert objects.bytes == 2 * 2 * sum(t.numel() for t in want.values())


def probe(number: int, model: CausalModel) -> list[int]:
    from reinforge.weights.probe import probe_of

    return probe_of(int(model.head.weight.shape[0]), 128, number)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_an_adapter_travels_alone(sent: Callable[..., Any], kind: str) -> None:
    """What it is added to is stored once, also for servers that take whole models only."""
    model = causal("lora")
    whole = sum(t.numel() * 4 for _, t in named_weights(model.module))
    adapter = sum(p.numel() * 4 for p in model.module.parameters() if p.requires_grad)
    objects, send = sent(kind, model, "float32")
    sizes = []
    for number in range(3):
        before = objects.bytes
        published = send(number)
        sizes.append(objects.bytes - before)
        message = published.channel.message()
        if kind == "vllm":
            base = dict(from_files(Path(message["base"])))
            new = dict(from_files(Path(message["folder"])))
            found = dict(on_base(base, new, CPU, False))
        else:
            found = load_file(Path(message["folder"]) / "model.safetensors")
        want = dict(named_weights(model.module))
        assert found.keys() == want.keys()
        gap = max(float((found[name] - want[name]).abs().max()) for name in want)
        assert gap < 1e-5
        train(model)
    assert sizes == [whole + adapter, adapter, adapter] and adapter < 0.5 * whole


def test_what_arrives_altered_is_refused() -> None:
    objects = ObjectStore()
    stored = StoredTensors.of(iter([("a", torch.ones(4)), ("b", torch.zeros(2))]), objects.put)
    assert [name for name, _ in stored.pairs(objects.get)] == ["a", "b"]
    objects.buckets[0][1][1].add_(1)
    with pytest.raises(RuntimeError, match="not those that were sent"):
        list(stored.pairs(partial(ObjectStore.get, objects)))
