"""Adapters and frozen weights on the ranks of FSDP2: what one process computes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from helpers.toys import make_module, make_samples, train_config
from reinforge.algorithms.losses.supervised import NLLLoss
from reinforge.backends.distributed.ranks import Ranks
from reinforge.backends.fsdp.backend import FsdpBackend
from reinforge.backends.local import LocalBackend
from reinforge.config.adapter import AdapterConfig
from reinforge.config.train import TrainConfig
from reinforge.core.batch import Totals, pack
from reinforge.models.adapters import add_adapter
from reinforge.models.causal import CausalModel
from reinforge.models.freezing import freeze

CASES: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "lora+": ({}, {"optimizer": {"lora_plus": 16.0}}),
    "dropout": ({"dropout": 0.2}, {}),
    "pissa": ({"init": "pissa"}, {}),
    "frozen": (None, {"freeze": ["model.layers.0", "*.k_proj", "lm_head"]}),
}


def load(adapter: dict[str, Any] | None, cfg: TrainConfig) -> CausalModel:
    module = make_module()
    if adapter is not None:
        module = add_adapter(module, AdapterConfig(rank=4, **adapter), seed=0)
    freeze(module, cfg)
    return CausalModel(module)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_one_process(case: str) -> None:
    adapter, changes = CASES[case]
    cfg = train_config(learning_rate=1e-3, **changes)
    make = partial(load, adapter, cfg)
    local = LocalBackend(make(), cfg, total_steps=3, reference=True, seed=5)
    batches = pack(make_samples((20, 5, 12, 3, 9)), 40, share=local.share)
    totals = Totals.of(batches)
    with Ranks.open(2, "cpu") as ranks:
        sharded = FsdpBackend(ranks, make, cfg, total_steps=3, reference=True, seed=5)
        assert sharded.share == local.share == (case != "dropout")
        for _ in range(3):
            found = []
            for backend in (local, sharded):
                step = backend.forward_backward(batches, NLLLoss(), totals)
                found.append({**step, **backend.step().metrics()})
            assert found[1] == pytest.approx(found[0], rel=1e-4)
        streams = []
        for backend in (local, sharded):
            backend.annotate(batches, frozenset({"old", "reference"}))
            streams.append(torch.cat([b.streams["reference"] for b in batches]))
        torch.testing.assert_close(streams[1], streams[0], atol=1e-5, rtol=1e-5)
        ours, theirs = local.state().tensors, sharded.state().tensors
        assert ours.keys() == theirs.keys()
        weights = [name for name in ours if name.startswith("model/")]
        assert all(torch.allclose(theirs[n], ours[n], atol=2e-4) for n in weights)
