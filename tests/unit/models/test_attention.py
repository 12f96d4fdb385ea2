"""Packed, prefilled and paged attention against the plain formula, with loops."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reinforge.models import attention
from reinforge.models.attention import (
    PADDING_WASTE,
    KVCache,
    KVShape,
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
V = 6  # numbers of a value
SINKS = torch.tensor([-1.0, 0.5, 3.0, 9.0])


def plain(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
    """One sequence in float64, token by token and head by head."""
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64)
    for t in range(q.shape[0]):
        first = 0 if rule.window is None else max(0, t - rule.window + 1)
        first = first if rule.chunk is None else t // rule.chunk * rule.chunk
        for h in range(q.shape[1]):
            shared = h // (q.shape[1] // k.shape[1])
            scores = (k[first : t + 1, shared].double() @ q[t, h].double()) * rule.scale
            if rule.softcap is not None:
                scores = rule.softcap * torch.tanh(scores / rule.softcap)
            weights = scores.exp() / (scores.exp().sum() + sink_of(rule, h))
            out[t, h] = weights @ v[first : t + 1, shared].double()
    return out


def sink_of(rule: AttentionRule, head: int) -> Tensor | float:
    """What a sink adds to the sum of the softmax."""
    return 0.0 if rule.sinks is None else rule.sinks[head].double().exp()


def qkv(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((H, D), (K, D), (K, V))
    return tuple(2 * torch.randn(tokens, *shape, generator=generator) for shape in shapes)  # type: ignore[return-value]


def starts_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


RULES = [
    AttentionRule(0.3),
    AttentionRule(0.3, window=3),
    AttentionRule(0.3, softcap=1.5),
    AttentionRule(0.3, window=3, softcap=1.5),
    AttentionRule(0.3, sinks=SINKS),
    AttentionRule(0.3, window=3, sinks=SINKS),
    AttentionRule(0.3, chunk=4),
    AttentionRule(0.3, chunk=5, sinks=SINKS),
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
    cache = KVCache.allocate([KVShape(K, D, V)], 16, size, torch.float32, torch.device("cpu"))
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


class _Known(torch.autograd.Function):
    """Attention whose gradients are known tensors."""

    @staticmethod
    def forward(ctx, q, k, v, grads):  # type: ignore[no-untyped-def]
        ctx.grads = grads
        return torch.zeros(*q.shape[:2], v.shape[2])

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        return *(grad.view_as(grad) for grad in ctx.grads), None


def test_gradients_reach_the_projections_without_a_copy() -> None:
    """What attention computes as gradients [N, H, D] is what projections get as [1, N, H·D]."""
    grads = qkv(5, seed=1)

    class Known:
        def attend(self, layer: int, *inputs: object) -> Tensor:
            out: Tensor = _Known.apply(*inputs[:3], grads)
            return out

    module = torch.nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    projected = [x.flatten(1)[None].requires_grad_() for x in qkv(5)]
    heads = [
        x.view(1, 5, -1, size).transpose(1, 2) for x, size in zip(projected, (D, D, V), strict=True)
    ]
    out, _ = _attention(module, *heads, layout=Known())  # type: ignore[arg-type]
    found = torch.autograd.grad(out.sum(), projected)
    for ours, known in zip(found, grads, strict=True):
        assert ours.data_ptr() == known.data_ptr()
        assert torch.equal(ours, known.flatten(1)[None])


@pytest.mark.parametrize("window", [None, 8])
def test_the_kernel_for_gpus_takes_what_it_is_given(window: int | None) -> None:
    """It is an operator below torch's public surface: without a GPU at least its arguments and
    shapes are checked, on no data.
    """
    q, k, v = (torch.empty(40, n, 64, device="meta", dtype=torch.bfloat16) for n in (4, 2, 2))
    starts = torch.empty(4, device="meta", dtype=torch.int32)
    out = varlen_attention(q, k, v, starts, starts, 20, 20, AttentionRule(0.1, window=window))
    assert out.shape == q.shape and out.dtype == q.dtype


def test_flash_attention_with_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the kernel knows no sinks: what is made of its output, its log-sum-exp and its own
    backward is the softmax with one more column, and so are all gradients. The kernel is written
    out here.
    """
    rule = AttentionRule(0.3, sinks=SINKS.double())
    inputs = [x.double().requires_grad_() for x in qkv(7)]
    sinks = SINKS.double().requires_grad_()

    def scores(q: Tensor, k: Tensor) -> Tensor:
        """[H, N, N]"""
        products = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(H // K, 1)) * rule.scale
        return products.masked_fill(~torch.ones(7, 7, dtype=torch.bool).tril(), float("-inf"))

    def forward(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, ...]:
        found = scores(q, k)
        out = torch.einsum("hqk,khd->qhd", found.softmax(-1), v.repeat_interleave(H // K, 1))
        return out, found.logsumexp(-1), torch.zeros(2), torch.zeros(()), torch.zeros(0)

    def backward(
        g: Tensor, inputs: tuple[Tensor, ...], found: tuple[Tensor, ...], *_: object
    ) -> tuple[Tensor, ...]:
        q, k, v = inputs
        weights = (scores(q, k) - found[1][..., None]).exp()
        of_v = torch.einsum("hqk,qhd->khd", weights, g)
        toward = torch.einsum("qhd,khd->hqk", g, v.repeat_interleave(H // K, 1))
        met = (g * found[0]).sum(-1).transpose(0, 1)[..., None]
        of_scores = weights * (toward - met) * rule.scale
        of_q = torch.einsum("hqk,khd->qhd", of_scores, k.repeat_interleave(H // K, 1))
        of_k = torch.einsum("hqk,qhd->khd", of_scores, q)
        return of_q, *(x.view(7, K, H // K, -1).sum(2) for x in (of_k, of_v))

    monkeypatch.setattr(attention, "_flash_forward", forward)
    monkeypatch.setattr(attention, "_flash_backward", backward)
    starts = starts_of([7])
    weight = torch.randn(7, H, V, generator=torch.Generator().manual_seed(1)).double()
    asked = replace(rule, sinks=sinks)
    ours = varlen_attention(*inputs, starts, starts, 7, 7, asked)
    theirs = PackedLayout([7], starts).attend(0, *inputs, asked)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    found = torch.autograd.grad((ours * weight).sum(), [*inputs, sinks])
    want = torch.autograd.grad((theirs * weight).sum(), [*inputs, sinks])
    for x, y in zip(found, want, strict=True):
        torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-5)
