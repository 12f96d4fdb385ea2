"""Adapters and frozen weights on the ranks of FSDP2: what one process computes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.toys import make_module, make_samples, train_config
from reinforge.algorithms.losses.supervised import NLLLoss
from reinforge.backends.distributed.ranks import Ranks
from reinforge.backends.fsdp.backend import FsdpBackend
from reinforge.backends.fsdp.worker import FsdpWorker
from reinforge.backends.local import LocalBackend
from reinforge.config.adapter import AdapterConfig
from reinforge.config.model import ModelConfig
from reinforge.config.train import TrainConfig
from reinforge.core.batch import Totals, pack
from reinforge.models.adapters import add_adapter
from reinforge.models.causal import CausalModel
from reinforge.models.freezing import freeze
from reinforge.models.load import load_model
from reinforge.models.tiny import make_tiny_model

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


def load_in_4_bits(path: str) -> CausalModel:
    model = load_model(
        ModelConfig(path=path, device="cpu"), AdapterConfig(kind="qlora", rank=4), seed=0
    )
    assert isinstance(model, CausalModel)
    return model


def held(worker: FsdpWorker) -> tuple[int, int, int]:
    """Bytes of 4-bit weights that this rank holds between passes, of all that there are, and of the
    scales of their blocks.
    """
    from bitsandbytes.nn import Linear4bit

    layers = [layer for layer in worker.model.module.modules() if isinstance(layer, Linear4bit)]
    own = sum(layer.weight.to_local().numel() for layer in layers)
    scales = sum(layer.quant_state.absmax.nbytes for layer in layers)
    assert all(layer.weight.dtype == torch.uint8 for layer in layers)
    return own, sum(layer.weight.numel() for layer in layers), scales


def test_a_base_in_4_bits_is_cut_over_ranks(tmp_path: Path) -> None:
    """Each holds half of the bytes; gradients, updates and log-probs are those of one process."""
    pytest.importorskip("bitsandbytes")
    path = make_tiny_model(
        tmp_path / "model", width=48, layers=2, heads=2, kv_heads=1, context=256, spread=0.2
    )
    cfg = train_config(learning_rate=1e-3)
    make = partial(load_in_4_bits, str(path))
    local = LocalBackend(make(), cfg, total_steps=3, reference=True, seed=5)
    batches = pack(make_samples((20, 5, 12, 3, 9)), 40, share=local.share)
    totals = Totals.of(batches)
    with Ranks.open(2, "cpu") as ranks:
        full = make()
        sharded = FsdpBackend(ranks, make, cfg, full=full, total_steps=3, reference=True, seed=5)
        shares = ranks.call(sharded.id, held)
        whole = shares[0][1]
        assert sum(own for own, _, _ in shares) == whole > 10_000
        for own, _, scales in shares:
            assert own <= 0.51 * whole
            assert scales == whole / 32  # a byte for 64 weights
        for _ in range(3):
            found = []
            for backend in (local, sharded):
                step = backend.forward_backward(batches, NLLLoss(), totals)
                found.append({**step, **backend.step().metrics()})
            assert found[1] == pytest.approx(found[0], rel=1e-4)
        for need in ("old", "reference"):
            streams = []
            for backend in (local, sharded):
                backend.annotate(batches, frozenset({need}))
                streams.append(torch.cat([b.streams[need] for b in batches]))
            torch.testing.assert_close(streams[1], streams[0], atol=1e-5, rtol=1e-5)
        ours, theirs = local.state().tensors, sharded.state().tensors
        assert ours.keys() == theirs.keys() and all("lora" in name for name in ours)
        assert all(torch.allclose(theirs[n], ours[n], atol=2e-4) for n in ours if "model/" in n)
        # the module that rank 0 generates with
        sharded.weights()
        sharded.annotate(batches, frozenset({"old"}))
        with torch.no_grad():
            said = full.logprobs(batches[0], temperature=1.0)[0]
        torch.testing.assert_close(said, batches[0].streams["old"], atol=1e-5, rtol=1e-5)
