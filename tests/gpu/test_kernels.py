"""Each Triton kernel against its plain-torch twin in float64.

Runs on a GPU, or on a CPU in Triton's interpreter (conftest.py).
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers import needs
from reinforge.engines.native.sampler import draw, uniform
from reinforge.models.attention import KVCache, KVShape, PagedLayout
from reinforge.models.attention_rule import AttentionRule
from reinforge.models.fp8 import E4M3, Fp8Rows
from reinforge.models.head import FORBIDDEN, LogitRule, gradient, statistics

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = needs.unless(
    importlib.util.find_spec("triton") is not None,
    "triton",
    "not installed: pip install 'reinforge[kernels]'",
)
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
RULES = [AttentionRule(0.2), AttentionRule(0.2, window=20), AttentionRule(0.2, softcap=3.0)]


@pytest.mark.parametrize("size", [8, 64, 96, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (14, 2)])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_paged_decode(size: int, heads: int, kv_heads: int, rule: AttentionRule) -> None:
    compare_with_torch(size, heads, kv_heads, rule, [0, 1, 15, 16, 33, 100], 16)


@pytest.mark.parametrize("size", [64, 128, 96])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (14, 2)])
@pytest.mark.parametrize(
    "rule", [AttentionRule(0.2), AttentionRule(0.2, window=70, softcap=3.0)], ids=str
)
def test_blocks_with_room_for_whole_tiles(
    size: int, heads: int, kv_heads: int, rule: AttentionRule
) -> None:
    compare_with_torch(size, heads, kv_heads, rule, [0, 63, 64, 65, 130, 300], 64)


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_tiles_that_come_by_a_descriptor(
    block: int, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Narrow heads of many rows; the interpreter is too slow for many."""
    from reinforge.models.kernels import paged_attention

    if not paged_attention.HAS_TMA:
        pytest.skip("a GPU before Hopper has no such instruction")
    made = []
    descriptors = paged_attention.descriptors

    def heard(*asked: Any) -> Any:
        made.append(descriptors(*asked))
        return made[-1]

    monkeypatch.setattr(paged_attention, "descriptors", heard)
    monkeypatch.setattr(paged_attention, "MULTIPROCESSORS", 12)
    compare_with_torch(
        64, 14, 2, AttentionRule(0.2, softcap=softcap), [0, 63, 64, 65, 130, 300], block
    )
    assert None not in made and len(made) == 1


@pytest.mark.parametrize(("size", "value_size"), [(64, 64), (24, 16), (16, 40), (192, 128)])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("parts", [1, 4])
def test_sinks_and_values_of_another_size(
    size: int, value_size: int, window: int | None, parts: int
) -> None:
    """gpt-oss has sinks, latent attention has values of fewer numbers."""
    sinks = torch.linspace(-2.0, 4.0, 6, device=DEVICE)
    for each in (None, sinks):
        rule = AttentionRule(0.2, window=window, sinks=each)
        lengths = [0, 1, 63, 130]
        compare_with_torch(size, 6, 2, rule, lengths, 16, value_size=value_size, parts=parts)


@pytest.mark.parametrize("chunk", [8, 40])
@pytest.mark.parametrize("parts", [1, 4])
def test_chunks(chunk: int, parts: int) -> None:
    rule = AttentionRule(0.2, chunk=chunk)
    compare_with_torch(16, 6, 2, rule, [0, 7, 8, 39, 40, 130], 16, parts=parts)


def compare_with_torch(
    size: int,
    heads: int,
    kv_heads: int,
    rule: AttentionRule,
    lengths: list[int],
    block: int,
    *,
    value_size: int | None = None,
    parts: int = 1,
) -> None:
    from reinforge.models.kernels.paged_attention import paged_decode

    torch.manual_seed(0)
    width = max(lengths) // block + 2
    shape = KVShape(kv_heads, size, value_size or size)
    cache = KVCache.allocate(
        [shape], len(lengths) * width, block, torch.float32, torch.device(DEVICE)
    )
    for part in (cache.keys[0], cache.values[0]):
        part.normal_()
    tables = torch.randperm(len(lengths) * width).view(len(lengths), width).to(DEVICE)
    cached = torch.tensor(lengths, device=DEVICE)
    q, k, v = (
        torch.randn(len(lengths), *rest, device=DEVICE)
        for rest in ((heads, size), (kv_heads, size), (kv_heads, shape.value))
    )
    wide = KVCache([cache.keys[0].double().cpu()], [cache.values[0].double().cpu()], block)
    want = PagedLayout(wide, tables.cpu(), cached.cpu()).attend(
        0,
        q.double().cpu(),
        k.double().cpu(),
        v.double().cpu(),
        replace(rule, sinks=None if rule.sinks is None else rule.sinks.cpu()),
    )
    got = paged_decode(q, k, v, cache.keys[0], cache.values[0], tables, cached, rule, parts=parts)
    torch.testing.assert_close(got.double().cpu(), want, atol=2e-5, rtol=1e-4)
    # the new key and its value are where they belong, and nowhere else
    torch.testing.assert_close(cache.keys[0].double().cpu(), wide.keys[0])
    torch.testing.assert_close(cache.values[0].double().cpu(), wide.values[0])


def paged(
    lengths: list[int], kv_heads: int, size: int, width: int, block: int = 16
) -> tuple[KVCache, torch.Tensor, torch.Tensor]:
    """A cache of random numbers, block tables and lengths."""
    rows = len(lengths)
    cache = KVCache.allocate(
        [KVShape(kv_heads, size, size)], rows * width, block, torch.float32, torch.device(DEVICE)
    )
    for part in (cache.keys[0], cache.values[0]):
        part.normal_()
    tables = torch.randperm(rows * width).view(rows, width)
    return cache, tables.to(DEVICE), torch.tensor(lengths, device=DEVICE)


def attended_in_torch(
    cache: KVCache,
    tables: torch.Tensor,
    cached: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, KVCache]:
    wide = KVCache(
        [cache.keys[0].double().cpu()], [cache.values[0].double().cpu()], cache.block_size
    )
    turned = None if rope is None else (rope[0].double().cpu(), rope[1].double().cpu())
    q, k, v = (x.double().cpu() for x in (q, k, v))
    layout = PagedLayout(wide, tables.cpu(), cached.cpu())
    return layout.attend(0, q, k, v, AttentionRule(0.2), rope=turned), wide


@pytest.mark.parametrize("lengths", [[0, 700, 64, 1030], [5, 2000]])
@pytest.mark.parametrize(
    ("turned", "size", "block"), [(False, 32, 16), (True, 32, 16), (True, 64, 64)]
)
def test_long_contexts_are_shared_among_programs(
    lengths: list[int], turned: bool, size: int, block: int
) -> None:
    """Parts of the keys are attended by programs of their own, and joined."""
    from reinforge.models.kernels.paged_attention import paged_decode

    torch.manual_seed(1)
    cache, tables, cached = paged(lengths, 2, size, 2080 // block, block)
    q, k, v = (torch.randn(len(lengths), n, size, device=DEVICE) for n in (6, 2, 2))
    angles = torch.randn(2001, size, device=DEVICE)  # of every position
    rope = (angles.cos(), angles.sin()) if turned else None
    want, wide = attended_in_torch(cache, tables, cached, q, k, v, rope)
    got = paged_decode(
        q,
        k,
        v,
        cache.keys[0],
        cache.values[0],
        tables,
        cached,
        AttentionRule(0.2),
        parts=16,
        rope=rope,
    )
    torch.testing.assert_close(got.double().cpu(), want, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(cache.keys[0].double().cpu(), wide.keys[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("size", [24, 64])
@pytest.mark.parametrize(("parts", "rule"), list(zip((1, 1, 4), RULES, strict=True)), ids=str)
def test_a_cache_in_fp8(size: int, parts: int, rule: AttentionRule) -> None:
    from reinforge.models.kernels.paged_attention import paged_decode

    torch.manual_seed(3)
    lengths = [0, 1, 15, 16, 33, 300]
    width = 20
    rows = len(lengths)
    twin = KVCache.allocate([KVShape(2, size, size)], rows * width, 16, E4M3, torch.device("cpu"))
    every = torch.arange(rows * width * 16)
    # powers of two times few bits, which every way to round keeps
    k, v = (torch.randint(-7, 8, (len(every), 2, size)) * 0.25 for _ in range(2))
    for x in (k, v):
        x[..., 0] = 7 * 0.25
    twin.write(0, every, k * 3, v * torch.logspace(-3, 3, len(every))[:, None, None])
    tables = torch.randperm(rows * width).view(rows, width)
    cached = torch.tensor(lengths)
    q = torch.randn(rows, 6, size)
    k, v = (torch.randint(-7, 8, (rows, 2, size)) * 0.5 for _ in range(2))
    for x in (k, v):
        x[..., 0] = 7 * 0.5
    assert twin.scales is not None
    here = KVCache(
        [part.clone().to(DEVICE) for part in twin.keys],
        [part.clone().to(DEVICE) for part in twin.values],
        16,
        [(a.clone().to(DEVICE), b.clone().to(DEVICE)) for a, b in twin.scales],
    )
    want = PagedLayout(twin, tables, cached).attend(0, q, k, v, rule)
    assert here.scales is not None
    got = paged_decode(
        *(x.to(DEVICE) for x in (q, k, v)),
        here.keys[0],
        here.values[0],
        tables.to(DEVICE),
        cached.to(DEVICE),
        rule,
        parts=parts,
        scales=here.scales[0],
    )
    torch.testing.assert_close(got.cpu(), want, atol=1e-4, rtol=1e-4)
    for mine, other in zip(here.tensors, twin.tensors, strict=True):
        torch.testing.assert_close(mine.cpu(), other, atol=0, rtol=1e-6)


def test_so_many_programs_share_the_keys_of_a_sequence() -> None:
    from reinforge.models.kernels.paged_attention import parts_of

    # few sequences: as many as have something to do; many: one each, unless some are very long
    assert [parts_of(4, 4, n) for n in (90, 400, 8000)] == [1, 4, 16]
    assert [parts_of(64, 4, n) for n in (90, 600, 8000)] == [1, 2, 2]
    assert [parts_of(512, 2, n) for n in (600, 8000, 30000)] == [1, 1, 4]


def test_advance() -> None:
    """A row that is done stands still; others end at a stop token or at their limit."""
    from reinforge.models.kernels import draw as kernels

    def rows(*values: int) -> torch.Tensor:
        return torch.tensor(values, device=DEVICE)

    newest = rows(9, 9, 9, 9)
    cached = rows(5, 6, 7, 8)
    produced = rows(1, 2, 3, 4)
    done = torch.tensor([True, False, False, False], device=DEVICE)
    stops = torch.tensor([[3, -1, -1], [3, 4, -1], [3, -1, -1], [-1, -1, -1]], device=DEVICE)
    kernels.advance(rows(7, 4, 4, 3), newest, cached, produced, rows(9, 9, 9, 5), done, stops)
    assert newest.tolist() == [9, 4, 4, 3]
    assert cached.tolist() == [5, 7, 8, 9] and produced.tolist() == [1, 3, 4, 5]
    assert done.tolist() == [True, True, False, True]


@pytest.mark.parametrize("parts", [0, 1, 3])
def test_add_norm(parts: int) -> None:
    from reinforge.models import decode_ops
    from reinforge.models.kernels import layer

    torch.manual_seed(3)
    x = torch.randn(5, 200, device=DEVICE)
    weight = torch.randn(200, device=DEVICE)
    delta = torch.randn(parts, 5, 200, device=DEVICE) if parts else None
    if parts == 1 and delta is not None:
        delta = delta[0]
    plain = x.double().cpu()
    wide = None if delta is None else delta.double().cpu()
    want = decode_ops.add_norm(plain, wide, weight.double().cpu(), 1e-6)
    got = layer.add_norm(x, delta, weight, 1e-6)
    torch.testing.assert_close(got.double().cpu(), want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(x.double().cpu(), plain, atol=1e-6, rtol=1e-6)


def test_head_norm_and_silu_mul() -> None:
    from reinforge.models import decode_ops
    from reinforge.models.kernels import layer

    torch.manual_seed(4)
    joint = torch.randn(3, 8 * 24, device=DEVICE)
    heads = joint.view(3, 8, 24)[:, 2:6]  # some of the heads that lie in one row
    weight = torch.randn(24, device=DEVICE)
    before = joint.clone()
    want = decode_ops.head_norm(heads.double().cpu(), weight.double().cpu(), 1e-6)
    got = layer.head_norm(heads, weight, 1e-6)
    torch.testing.assert_close(got.double().cpu(), want, atol=1e-5, rtol=1e-5)
    assert torch.equal(before[:, :48], joint[:, :48]) and torch.equal(
        before[:, 144:], joint[:, 144:]
    )
    got = layer.silu_mul(joint)
    want = decode_ops.silu_mul(joint.double().cpu())
    torch.testing.assert_close(got.double().cpu(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("rows", "inner", "outer"), [(1, 64, 96), (5, 200, 130), (16, 1100, 40)])
def test_products_of_few_rows(
    rows: int, inner: int, outer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from reinforge.models import decode_ops
    from reinforge.models.kernels import layer

    torch.manual_seed(5)
    x = torch.randn(rows, inner, device=DEVICE)
    weight = torch.randn(outer, inner, device=DEVICE) * inner**-0.5
    bias = torch.randn(outer, device=DEVICE)
    wide = x.double().cpu() @ weight.double().cpu().t()
    got = layer.few_rows(x, weight, bias)
    close = {"atol": 1e-5, "rtol": 1e-4}
    torch.testing.assert_close(got.double().cpu(), wide + bias.double().cpu(), **close)
    parts = layer.few_rows(x, weight, parts=True)
    assert parts.dtype == torch.float32 and (inner < 200 or len(parts) > 1)
    torch.testing.assert_close(parts.sum(0).double().cpu(), wide, **close)
    for slice_ in layer.SLICES[4, 32]:
        monkeypatch.setattr(layer, "slice_of", lambda *_, slice_=slice_: slice_)
        gated = layer.gated_rows(x, weight)
        torch.testing.assert_close(gated.double().cpu(), decode_ops.silu_mul(wide), **close)


def test_slices_fill_the_multiprocessors() -> None:
    from reinforge.models.kernels import layer

    # of the 18,944 outputs of a 7B model: 395 slices of 48, for which there are 396 places
    assert layer.slice_of(4, 18944, 2)[:2] == (32, 16)
    # 528 of 32 outputs fill four places of each
    assert layer.slice_of(16, 132 * 4 * 32, 2)[:2] == (32, 0)


def assert_same_rows(got: Fp8Rows, want: Fp8Rows) -> None:
    """Up to numbers between two of e4m3, which a division that rounds otherwise may send to either.

    Triton's interpreter forgets to carry where it rounds up to a power of two, and rounds the
    smallest numbers down: those are left out there.
    """
    got = Fp8Rows(got.values.cpu(), got.scale.cpu())
    torch.testing.assert_close(got.scale, want.scale, atol=0, rtol=1e-6)
    codes = want.values.float()
    if INTERPRETED:
        compared = (codes.abs().frexp()[0] != 0.5) & (codes.abs() > 2.0**-5)
    else:
        compared = torch.ones_like(codes, dtype=torch.bool)
    assert compared.float().mean() > 0.4
    other = (got.values.float() != codes) & compared
    assert other.float().mean() < 1e-3
    assert ((got.values.float() - codes).abs()[other] <= codes.abs()[other] * 0.13 + 2.0**-9).all()


def kernels_of_fp8() -> Any:
    from reinforge.models.kernels import fp8

    return fp8


@pytest.mark.parametrize(("rows", "size"), [(1, 16), (5, 200), (3, 5000)])
def test_rows_in_fp8(rows: int, size: int) -> None:
    torch.manual_seed(7)
    x = torch.randn(rows, size + 8, device=DEVICE)[:, :size]  # rows that lie apart
    x[0] *= 1000
    want = Fp8Rows.of(x.cpu())
    got = Fp8Rows.empty(rows, size, x.device)
    kernels_of_fp8().quantise_rows(x, got.values, got.scale)
    assert_same_rows(got, want)


def test_what_is_no_number_is_none_in_fp8() -> None:
    """NaN in one row, or in one column of one weight, and only there."""
    x = torch.randn(3, 200, device=DEVICE)
    x[1, 7] = float("nan")
    rows = Fp8Rows.empty(3, 200, x.device)
    kernels_of_fp8().quantise_rows(x, rows.values, rows.scale)
    assert rows.plain().isnan().all(1).tolist() == [False, True, False]
    assert rows.plain()[[0, 2]].isfinite().all()
    weights = [torch.randn(1100, 70, device=DEVICE), torch.randn(5, 70, device=DEVICE)]
    weights[0][600, 3] = float("nan")
    columns = Fp8Rows.empty(70, 1105, x.device)
    kernels_of_fp8().quantise_columns(weights, columns.values, columns.scale)
    lost = columns.plain().isnan()
    assert lost[3].all() and not lost[:3].any() and not lost[4:].any()


@pytest.mark.parametrize(
    ("sizes", "inner"), [((16,), 16), ((130, 5), 70), ((600, 40, 1), 200), ((1100,), 65)]
)
def test_columns_in_fp8(sizes: tuple[int, ...], inner: int) -> None:
    torch.manual_seed(8)
    weights = [torch.randn(size, inner + 8, device=DEVICE)[:, :inner] for size in sizes]
    weights[-1][-1, 0] = 1000  # the largest of its column is in the last row of all
    want = Fp8Rows.of_columns([weight.cpu() for weight in weights])
    got = Fp8Rows.empty(inner, sum(sizes), weights[0].device)
    kernels_of_fp8().quantise_columns(weights, got.values, got.scale)
    assert_same_rows(got, want)
    again = Fp8Rows.empty(inner, sum(sizes), weights[0].device)
    kernels_of_fp8().quantise_columns(weights, again.values, again.scale)
    assert torch.equal(got.values.view(torch.uint8), again.values.view(torch.uint8))


@pytest.mark.parametrize(
    ("rows", "inner", "outer"), [(1, 64, 96), (5, 208, 130), (16, 1104, 40), (40, 512, 64)]
)
def test_products_of_few_rows_in_fp8(rows: int, inner: int, outer: int) -> None:
    from reinforge.models import decode_ops, fp8
    from reinforge.models.kernels import layer

    torch.manual_seed(8)
    x = Fp8Rows.of(torch.randn(rows, inner))
    weight = Fp8Rows.of(torch.randn(outer, inner) * inner**-0.5)
    bias = torch.randn(outer)
    there = [Fp8Rows(one.values.to(DEVICE), one.scale.to(DEVICE)) for one in (x, weight)]
    wide = x.plain(torch.float64) @ weight.plain(torch.float64).t()
    # a tensor core keeps fewer bits of a sum than float32 has
    close = {"atol": 1e-5, "rtol": 1e-4} if DEVICE == "cpu" else {"atol": 2e-3, "rtol": 1e-2}
    got = layer.few_rows(*there, bias.to(DEVICE), dtype=torch.float32)
    torch.testing.assert_close(got.double().cpu(), wide + bias.double(), **close)
    torch.testing.assert_close(got.cpu(), fp8.product(x, weight, bias, torch.float32), **close)
    parts = layer.few_rows(*there, parts=True)
    assert parts.dtype == torch.float32 and (inner < 512 or len(parts) > 1)
    torch.testing.assert_close(parts.sum(0).double().cpu(), wide, **close)
    gated = layer.gated_rows(*there, torch.float32)
    torch.testing.assert_close(gated.double().cpu(), decode_ops.silu_mul(wide), **close)


def test_add_norm_in_fp8() -> None:
    from reinforge.models.kernels import layer

    torch.manual_seed(9)
    x = torch.randn(5, 200, device=DEVICE)
    weight = torch.randn(200, device=DEVICE)
    into = Fp8Rows.empty(5, 200, x.device)
    normed = layer.add_norm(x, None, weight, 1e-6, into)
    assert_same_rows(into, Fp8Rows.of(normed.cpu()))


def test_draw() -> None:
    from reinforge.models.kernels import draw as kernels

    torch.manual_seed(0)
    rows = 64
    vocabulary = 5000
    logits = torch.randn(rows, vocabulary, device=DEVICE) * 3
    temperatures = torch.tensor([0.0, 0.7, 1.0, 1.5], device=DEVICE).repeat(rows // 4)
    seeds = torch.randint(0, 2**62, (rows,), device=DEVICE)
    positions = torch.arange(rows, device=DEVICE)
    tokens, logprobs = kernels.draw(logits, temperatures, seeds, positions)
    plain, plain_logprobs = draw(
        logits.cpu(), temperatures.cpu(), uniform(seeds.cpu(), positions.cpu())
    )
    same = tokens.cpu() == plain
    # they may part only where u falls on a boundary of the cumulative distribution
    assert same.float().mean() > 0.95
    torch.testing.assert_close(logprobs.cpu()[same], plain_logprobs[same], atol=1e-4, rtol=1e-5)
    z = logits.double() / torch.where(temperatures == 0, 1.0, temperatures.double())[:, None]
    torch.testing.assert_close(
        logprobs.double(), z.log_softmax(-1).gather(1, tokens[:, None])[:, 0], atol=1e-4, rtol=1e-5
    )


@pytest.mark.parametrize("rule", [LogitRule(), LogitRule(scale=0.5, softcap=4.0)])
def test_exact_logprobs_are_those_that_draw_reports(rule: LogitRule) -> None:
    from reinforge.models.kernels import draw as kernels

    torch.manual_seed(0)
    logits = torch.randn(12, 9001, device=DEVICE) * 3
    heat = torch.tensor([0.7, 1.0, 1.5], device=DEVICE).repeat(4)
    seeds = torch.arange(12, device=DEVICE)
    given = {"scale": rule.scale, "softcap": rule.softcap}
    tokens, drawn = kernels.draw(logits, heat, seeds, seeds, exact=True, **given)
    logprobs, lse = kernels.exact_logprobs(logits, tokens, heat, **given)
    assert torch.equal(drawn, logprobs)
    for row in (0, 7):  # alone, and without a temperature where that is 1
        part = slice(row, row + 1)
        cold = heat[part] * (heat[part] != 1)
        for some in (heat[part], cold):
            alone = kernels.exact_logprobs(logits[part], tokens[part], some, **given)[0]
            assert torch.equal(alone, drawn[part])
    want = statistics(logits.double().cpu(), tokens.cpu(), heat.double().cpu(), rule, False)
    torch.testing.assert_close(drawn.double().cpu(), want[0].double(), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(lse.double().cpu(), want[1].double(), atol=1e-4, rtol=1e-5)


def test_draw_frequencies() -> None:
    from reinforge.models.kernels import draw as kernels

    rows = 20_000 if DEVICE == "cuda" else 100
    logits = torch.tensor([2.0, 0.0, 1.0, -1.0, 0.5], device=DEVICE).expand(rows, 5).contiguous()
    tokens, _ = kernels.draw(
        logits,
        torch.ones(rows, device=DEVICE),
        torch.arange(rows, device=DEVICE) * 7919,
        torch.zeros(rows, dtype=torch.int64, device=DEVICE),
    )
    share = torch.bincount(tokens.cpu(), minlength=5) / rows
    # four standard deviations
    torch.testing.assert_close(share, logits[0].cpu().softmax(-1), atol=2 / rows**0.5, rtol=0)


@pytest.mark.parametrize("rule", [LogitRule(), LogitRule(scale=0.5, softcap=4.0)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("vocabulary", [9001, 100])  # in the second most lanes meet no token
def test_softmax(rule: LogitRule, temperature: float, vocabulary: int) -> None:
    from reinforge.models.kernels import head as kernels

    torch.manual_seed(0)
    x = torch.randn(7, vocabulary, device=DEVICE) * 4
    x[:, 3] = -float("inf")
    targets = torch.randint(4, vocabulary, (7,), device=DEVICE)
    g = torch.randn(7, device=DEVICE)
    e = torch.randn(7, device=DEVICE)
    wide = x.double().cpu()
    where = targets.cpu()
    logp, lse, entropy = statistics(wide, where, temperature, rule, True)
    got = kernels.softmax_statistics(x, targets, temperature, rule.scale, rule.softcap, True)
    for ours, want in zip(got, (logp, lse, entropy), strict=True):
        assert ours is not None and want is not None
        torch.testing.assert_close(ours.double().cpu(), want.double(), atol=1e-4, rtol=1e-5)
    want = gradient(
        wide,
        where,
        lse.double(),
        g.double().cpu(),
        temperature,
        rule,
        entropy.double(),
        e.double().cpu(),
    )  # type: ignore[union-attr]
    ours = kernels.softmax_gradient(
        x.clone(), targets, got[1], g, temperature, rule.scale, rule.softcap, got[2], e
    )
    torch.testing.assert_close(ours.double().cpu(), want, atol=1e-5, rtol=1e-4)


def test_softmax_of_forbidden_tokens() -> None:
    """Whole lanes of them: one token of 9001 may be said, or two."""
    from reinforge.models.kernels import head as kernels

    x = torch.full((2, 9001), FORBIDDEN, device=DEVICE)
    x[0, 5000] = 3.0
    x[1, [7, 9000]] = torch.tensor([1.0, 2.0], device=DEVICE)
    targets = torch.tensor([5000, 9000], device=DEVICE)
    logp, lse, entropy = kernels.softmax_statistics(x, targets, 1.0, 1.0, None, True)
    two = torch.tensor([1.0, 2.0], dtype=torch.float64).log_softmax(-1)
    torch.testing.assert_close(logp.double().cpu(), torch.stack([two.new_zeros(()), two[1]]))
    torch.testing.assert_close(lse.double().cpu(), torch.stack([two.new_tensor(3.0), 2 - two[1]]))
    assert entropy is not None
    spread = -(two.exp() * two).sum()
    torch.testing.assert_close(entropy.double().cpu(), torch.stack([two.new_zeros(()), spread]))


def test_kernels_compile_for_a_gpu_that_is_not_here() -> None:
    """The interpreter accepts much that the compiler does not."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "helpers.kernel_compiler"],
        env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[0]) > 20


@pytest.mark.parametrize("kind", ["plain", "centred", "gated"])
@pytest.mark.parametrize("shape", [(1, 5, 3, 24), (7, 96), (1, 4, 3000)])
def test_norms(kind: str, shape: tuple[int, ...]) -> None:
    """With the roundings of the formulas; heads may lie apart."""
    from reinforge.models import norms
    from reinforge.models.kernels import norm as kernels

    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(*shape[:-1], 2 * shape[-1], generator=generator).to(DEVICE)
    x, gate = wide.chunk(2, -1)
    weight = torch.randn(shape[-1], generator=generator).to(DEVICE)
    if kind == "gated":
        got = kernels.rms_norm(x, weight, 1e-6, gate=gate)
        want = norms.gated_norm(x, weight, 1e-6, gate)
    elif kind == "centred":
        got = kernels.rms_norm(x, weight, 1e-6, centred=True)
        want = norms.centred_norm(x, weight, 1e-6)
    else:
        got = kernels.rms_norm(x, weight, 1e-6)
        want = norms.rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
