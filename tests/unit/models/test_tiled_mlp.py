"""MLPs of long packs in tiles of tokens: the same numbers, with less of them at once."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from helpers.toys import make_model, make_samples
from reinforge.config.adapter import AdapterConfig
from reinforge.core import mlp_tiles
from reinforge.core.batch import Batch
from reinforge.models.adapter_dropout import DroppedRows, drop_rows
from reinforge.models.adapters import add_adapter
from reinforge.models.causal import CausalModel
from reinforge.models.tiled_mlp import tiled

SHORT = 16  # tokens of a tile


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlp_tiles, "TILE", SHORT)
    monkeypatch.setattr(mlp_tiles, "LONG", 2 * SHORT)


@contextmanager
def widest(model: CausalModel) -> Iterator[list[int]]:
    """Tokens that the MLPs had at once."""
    found: list[int] = []
    hooks = [
        part.register_forward_pre_hook(lambda _, args: found.append(args[0].shape[-2]))
        for name, part in model.module.named_modules()
        if name.endswith("down_proj") and isinstance(part, nn.Module)
    ]
    yield found
    for hook in hooks:
        hook.remove()


def checkpointed(model: CausalModel) -> CausalModel:
    kept = {"use_reentrant": False}
    model.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kept)  # type: ignore[operator]
    return model


def gradients(model: CausalModel, batch: Batch) -> dict[str, torch.Tensor]:
    model.module.zero_grad()
    model.recompute(True)
    logprobs, _ = model.logprobs(batch, temperature=1.0)
    logprobs.square().sum().backward()
    model.recompute(False)
    return {
        name: part.grad.clone()
        for name, part in model.module.named_parameters()
        if part.grad is not None
    }


@pytest.mark.parametrize("adapter", [False, True])
def test_a_long_pack_has_the_same_gradients(adapter: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    if adapter:
        model = CausalModel(add_adapter(model.module, AdapterConfig(rank=4), seed=0))
    checkpointed(model)
    batch = Batch.pack(make_samples([50, 7, 21]))
    with widest(model) as seen:
        found = gradients(model, batch)
    # forward, in the layer that is computed again, in a tile that is
    assert max(seen) == SHORT and sum(seen) <= 3 * len(model.layers) * batch.n_tokens
    monkeypatch.setattr(mlp_tiles, "LONG", 10**6)
    with widest(model) as seen:
        want = gradients(model, batch)
    assert max(seen) == batch.n_tokens
    assert want.keys() == found.keys() and len(want) > 8
    for name, gradient in want.items():
        assert torch.allclose(found[name], gradient, atol=1e-6, rtol=1e-5), name


def test_scores_too_and_short_packs_not(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    long, short = (Batch.pack(make_samples(lengths)) for lengths in ([50, 7], [20, 12]))
    whole = copy.deepcopy(model)
    with torch.no_grad(), widest(model) as seen:
        found, _ = model.logprobs(long, temperature=1.0)
        assert max(seen) == SHORT
        seen.clear()
        model.logprobs(short, temperature=1.0)
        assert set(seen) == {32}
        monkeypatch.setattr(mlp_tiles, "LONG", 10**6)
        want, _ = whole.logprobs(long, temperature=1.0)
    assert torch.allclose(found, want, atol=1e-5)


def test_where_everything_is_kept_nothing_is_gained() -> None:
    """Without gradient checkpointing an MLP is computed at once: its numbers stay anyway."""
    model = make_model()
    with widest(model) as seen:
        gradients(model, Batch.pack(make_samples([50, 7])))
    assert set(seen) == {57}


def test_dropout_of_an_adapter_is_of_whole_packs() -> None:
    model = CausalModel(
        add_adapter(make_model().module, AdapterConfig(rank=4, dropout=0.5), seed=0)
    )
    checkpointed(model)
    batch = Batch.pack(make_samples([50, 7]))
    drop_rows(model.module, DroppedRows(batch, (0, 0)))
    with widest(model) as seen:
        gradients(model, batch)
    assert set(seen) == {57}


def test_it_is_there_once_and_only_after_a_long_pack() -> None:
    model = make_model()

    def tiles() -> list[object]:
        return [part for part in map(tiled, model.module.modules()) if part is not None]

    with torch.no_grad():
        model.logprobs(Batch.pack(make_samples([20])), temperature=1.0)
        assert tiles() == []
        model.logprobs(Batch.pack(make_samples([50])), temperature=1.0)
        before = tiles()
        model.logprobs(Batch.pack(make_samples([50])), temperature=1.0)
    assert len(before) == len(model.layers) and tiles() == before
