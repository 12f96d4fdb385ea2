"""Each Triton kernel against its plain-torch twin in float64.

Runs on a GPU, or on a CPU in Triton's interpreter (conftest.py).
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from helpers import needs
from reinforge.engines.native.sampler import draw, uniform
from reinforge.models.attention import KVCache, PagedLayout
from reinforge.models.head import LogitRule, gradient, statistics

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = needs.unless(
    importlib.util.find_spec("triton") is not None,
    "triton",
    "not installed: pip install 'reinforge[kernels]'",
)
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"


@pytest.mark.parametrize("size", [8, 64, 96, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (14, 2)])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (20, 0.0), (0, 3.0)])
def test_paged_decode(size: int, heads: int, kv_heads: int, window: int, softcap: float) -> None:
    from reinforge.models.kernels import paged_decode

    torch.manual_seed(0)
    lengths = [0, 1, 15, 16, 33, 100]
    width = 8
    block = 16
    cache = KVCache.allocate(
        [(kv_heads, size)], len(lengths) * width, block, torch.float32, torch.device(DEVICE)
    )
    for part in (cache.keys[0], cache.values[0]):
        part.normal_()
    tables = torch.randperm(len(lengths) * width).view(len(lengths), width).to(DEVICE)
    cached = torch.tensor(lengths, device=DEVICE)
    q, k, v = (
        torch.randn(len(lengths), n, size, device=DEVICE) for n in (heads, kv_heads, kv_heads)
    )
    wide = KVCache([cache.keys[0].double().cpu()], [cache.values[0].double().cpu()], block)
    want = PagedLayout(wide, tables.cpu(), cached.cpu()).attend(
        0,
        q.double().cpu(),
        k.double().cpu(),
        v.double().cpu(),
        0.2,
        window or None,
        softcap or None,
    )
    got = paged_decode(
        q, k, v, cache.keys[0], cache.values[0], tables, cached, 0.2, window, softcap
    )
    torch.testing.assert_close(got.double().cpu(), want, atol=2e-5, rtol=1e-4)
    # the new key is where it belongs, and nowhere else
    torch.testing.assert_close(cache.keys[0].double().cpu(), wide.keys[0])


def test_draw() -> None:
    from reinforge.models import kernels

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


def test_draw_frequencies() -> None:
    from reinforge.models import kernels

    rows = 20_000 if DEVICE == "cuda" else 300
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
def test_softmax(rule: LogitRule, temperature: float) -> None:
    from reinforge.models import kernels

    torch.manual_seed(0)
    x = torch.randn(7, 9001, device=DEVICE) * 4
    targets = torch.randint(0, 9001, (7,), device=DEVICE)
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
