"""Kernels of layers that keep state against plain torch; the interpreter runs them on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from reinforge.models.kernels import state as kernels
from reinforge.models.recurrences import GatedDelta
from reinforge.models.state import RowStates, StateStore

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KEY = (0, 0, 0)
SLOTS = [3, 1, 4]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def rows_of(shape: tuple[int, ...]) -> RowStates:
    """A store of some sequences, and the slots of three of them."""
    store = StateStore({KEY: (shape, torch.float32)}, 5, torch.device(DEVICE))
    store.parts[KEY].copy_(random(6, *shape, seed=9))
    return RowStates(store, torch.tensor(SLOTS, device=DEVICE))


@pytest.mark.parametrize(("taps", "biased"), [(4, False), (3, True), (1, False)])
def test_convolution(taps: int, biased: bool) -> None:
    channels = 70
    x = random(channels, 3).t()  # as transformers has it
    weight = random(channels, taps, seed=1)
    bias = random(channels, seed=2) if biased else None
    rows = rows_of((taps - 1, channels))
    before = rows.store.parts[KEY].clone()
    got = kernels.convolve(x, rows.store.parts[KEY], rows.slots, weight, bias)
    inputs = torch.cat([before[SLOTS], x[:, None]], 1)  # [N, K, C]
    want = (inputs * weight.t()).sum(1) + (0 if bias is None else bias)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(rows.store.parts[KEY][SLOTS], inputs[:, 1:])
    for other in (0, 2, 5):
        assert torch.equal(rows.store.parts[KEY][other], before[other])


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("size", "wide"), [(16, 16), (24, 40)])
def test_gated_delta(size: int, wide: int, normed: bool) -> None:
    """Token by token, as transformers writes it."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

    heads = 3
    mixed = random(3, heads * (2 * size + wide))
    query, key, value = mixed.split([heads * size, heads * size, heads * wide], -1)
    query, key = (x.unflatten(-1, (heads, size)) / (1 if normed else 4) for x in (query, key))
    value = value.unflatten(-1, (heads, wide))
    decay = -random(3, heads, seed=1).abs()
    beta = random(3, heads, seed=2).sigmoid()
    rows = rows_of((heads, size, wide))
    held = rows.store.parts[KEY]
    before = held.clone()
    parts = [query, key, value, decay, beta]
    single = [x[:, None] for x in parts]
    got = kernels.delta_scan(*single, held, held, rows.slots, normed)
    plain = torch_recurrent_gated_delta_rule
    rule = GatedDelta(plain, plain, normed)
    with torch.no_grad():
        want, final = rule(single, None, before[SLOTS])
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(held[SLOTS], final, atol=1e-4, rtol=1e-4)
    for other in (0, 2, 5):
        assert torch.equal(held[other], before[other])
    # the three tokens as one sequence, in one go and one after the other: to the bit
    line = [x[None] for x in parts]
    slots = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    final, state = torch.empty_like(before[:1]), torch.empty_like(before[:1])
    out = kernels.delta_scan(*line, None, final, slots, normed)
    for t in range(3):
        token = [x[:, t : t + 1].clone() for x in line]
        one = kernels.delta_scan(*token, state if t else None, state, slots, normed)
        assert torch.equal(one[:, 0], out[:, t])
    assert torch.equal(state, final)
    with torch.no_grad():
        torch.testing.assert_close(out, rule(line, None, None)[0], atol=1e-4, rtol=1e-4)
