"""Packed, prefilled and paged attention against the plain formula, with loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reinforge.core.errors import InputError
from reinforge.models.attention import (
    PADDING_WASTE,
    KVCache,
    PackedLayout,
    PagedLayout,
    PrefillLayout,
    _attention,
    tile_runs,
    varlen_attention,
)
from reinforge.models.attention_rule import AttentionRule

H = 4
K = 2
D = 8


def plain(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
    """One sequence in float64, token by token and head by head."""
    out = torch.zeros_like(q, dtype=torch.float64)
    for t in range(q.shape[0]):
        first = 0 if rule.window is None else max(0, t - rule.window + 1)
        for h in range(q.shape[1]):
            shared = h // (q.shape[1] // k.shape[1])
            scores = (k[first : t + 1, shared].double() @ q[t, h].double()) * rule.scale
            if rule.softcap is not None:
                scores = rule.softcap * torch.tanh(scores / rule.softcap)
            out[t, h] = scores.softmax(-1) @ v[first : t + 1, shared].double()
    return out


def qkv(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(2 * torch.randn(tokens, heads, D, generator=generator) for heads in (H, K, K))  # type: ignore[return-value]


def starts_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


RULES = [
    AttentionRule(0.3),
    AttentionRule(0.3, window=3),
    AttentionRule(0.3, softcap=1.5),
    AttentionRule(0.3, window=3, softcap=1.5),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(
    "lengths", [[7], [5, 5, 5], [9, 8, 8, 1], [1, 30, 2], [4, 17, 16, 16, 3]], ids=str
)
def test_packed_is_each_sequence_alone(lengths: list[int], rule: AttentionRule) -> None:
    q, k, v = qkv(sum(lengths))
    ours = PackedLayout(lengths, starts_of(lengths)).attend(0, q, k, v, rule)
    alone = [plain(*(x.split(lengths)[i] for x in (q, k, v)), rule) for i in range(len(lengths))]
    torch.testing.assert_close(ours.double(), torch.cat(alone), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(
    ("lengths", "prefix"),
    [([6, 4, 4, 7], [-1, 0, 0, -1]), ([3, 5, 9, 2, 8, 1], [-1, -1, 1, 0, 1, 0])],
    ids=str,
)
def test_a_segment_that_continues_another_is_their_tokens_in_one_sequence(
    lengths: list[int], prefix: list[int], rule: AttentionRule
) -> None:
    q, k, v = qkv(sum(lengths))
    ours = PackedLayout(lengths, starts_of(lengths), prefix).attend(0, q, k, v, rule).split(lengths)
    parts = list(zip(*(x.split(lengths) for x in (q, k, v)), strict=True))
    for i, before in enumerate(prefix):
        whole = [
            torch.cat([parts[before][j], parts[i][j]]) if before >= 0 else parts[i][j]
            for j in range(3)
        ]
        want = plain(*whole, rule)[-lengths[i] :]
        torch.testing.assert_close(ours[i].double(), want, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_paged_decode_is_the_last_row_of_packed(rule: AttentionRule) -> None:
    """Prompts are prefilled into scattered blocks of a cache full of rubbish; then one
    token each.
    """
    lengths = [5, 8, 9, 1]
    size = 4
    cache = KVCache.allocate([(K, D)], 16, size, torch.float32, torch.device("cpu"))
    for part in (*cache.keys, *cache.values):
        part.fill_(1e3)  # what earlier owners left behind
    tables = torch.tensor([[7, 2, 0], [3, 11, 4], [15, 9, 1], [5, 0, 0]])
    q, k, v = qkv(sum(lengths) + len(lengths))
    whole = [x.split([n + 1 for n in lengths]) for x in (q, k, v)]
    prompt = [torch.cat([part[:-1] for part in x]) for x in whole]
    newest = [torch.stack([part[-1] for part in x]) for x in whole]
    slots = torch.cat(
        [
            tables[i, torch.arange(n) // size] * size + torch.arange(n) % size
            for i, n in enumerate(lengths)
        ]
    )
    PrefillLayout(lengths, starts_of(lengths), cache, slots).attend(0, *prompt, rule)
    past = torch.tensor(lengths)
    ours = PagedLayout(cache, tables, past).attend(0, *newest, rule)
    for i, n in enumerate(lengths):
        want = plain(*(x[i] for x in whole), rule)[n]
        torch.testing.assert_close(ours[i].double(), want, atol=2e-6, rtol=1e-5)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=20))
def test_tiles_cover_and_waste_little(lengths: list[int]) -> None:
    runs = tile_runs(lengths, lengths)
    assert [i for a, b in runs for i in range(a, b)] == list(range(len(lengths)))
    assert all(max(lengths[a:b]) * (b - a) <= PADDING_WASTE * sum(lengths[a:b]) for a, b in runs)


def test_gradient_stays_inside_a_sequence() -> None:
    lengths = [6, 5, 9]
    q, k, v = (x.requires_grad_() for x in qkv(20))
    PackedLayout(lengths, starts_of(lengths)).attend(0, q, k, v, AttentionRule(0.3))[
        6:11
    ].sum().backward()
    for x in (q, k, v):
        assert x.grad is not None
        assert (
            float(x.grad[:6].abs().max()) == 0
            and float(x.grad[11:].abs().max()) == 0
            and float(x.grad[6:11].abs().max()) > 0
        )


def test_calls_that_cannot_be_right_are_refused() -> None:
    module = torch.nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    q = torch.zeros(1, H, 3, D)
    with pytest.raises(AssertionError, match="CausalModel.hidden"):
        _attention(module, q, q, q)
    with pytest.raises(AssertionError, match="batch size 1"):
        _attention(module, q.expand(2, -1, -1, -1), q, q, layout=PackedLayout([3], starts_of([3])))
    with pytest.raises(InputError, match="attention sinks"):
        _attention(module, q, q, q, layout=PackedLayout([3], starts_of([3])), s_aux=torch.zeros(H))


@pytest.mark.parametrize("left", [-1, 7])
def test_the_kernel_for_gpus_takes_what_it_is_given(left: int) -> None:
    """It is an operator below torch's public surface: without a GPU at least its arguments and
    shapes are checked, on no data.
    """
    q, k, v = (torch.empty(40, n, 64, device="meta", dtype=torch.bfloat16) for n in (4, 2, 2))
    starts = torch.empty(4, device="meta", dtype=torch.int32)
    out = varlen_attention(q, k, v, starts, starts, 20, 20, 0.1, left)
    assert out.shape == q.shape and out.dtype == q.dtype
