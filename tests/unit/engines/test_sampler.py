"""Draws: uniform numbers, frequencies, filters against float64 references."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from reinforge.core.seeds import seed_of
from reinforge.engines.native.sampler import draw, keep_top, uniform


def stream(count: int, seed: int = 0) -> Tensor:
    return uniform(torch.full((count,), seed_of(seed), dtype=torch.int64), torch.arange(count))


def splitmix64(seed: int, position: int) -> float:
    """The same in Python integers."""
    mask = (1 << 64) - 1
    x = (seed + (position + 1) * 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return ((x ^ (x >> 31)) >> 11) * 2.0**-53


def chi_square(counts: Tensor, p: Tensor) -> float:
    """The statistic in units of its standard deviation above its mean, cells of expectation below 5
    joined.
    """
    expected = p * counts.sum()
    small = expected < 5
    seen = torch.cat([counts[~small], counts[small].sum()[None]]) if bool(small.any()) else counts
    want = (
        torch.cat([expected[~small], expected[small].sum()[None]])
        if bool(small.any())
        else expected
    )
    keep = want > 0
    assert float(seen[~keep].sum()) == 0
    degrees = int(keep.sum()) - 1
    return (float(((seen[keep] - want[keep]) ** 2 / want[keep]).sum()) - degrees) / math.sqrt(
        2 * degrees
    )


def test_uniform_is_the_published_generator() -> None:
    seeds = [0, 1, 2**62 + 12345, seed_of("a")]
    for seed in seeds:
        found = uniform(torch.full((50,), seed, dtype=torch.int64), torch.arange(50))
        assert found.tolist() == [splitmix64(seed, i) for i in range(50)]


def test_uniform_moments_and_independence() -> None:
    u = stream(100_000)
    assert float(u.min()) >= 0 and float(u.max()) < 1
    assert float(u.mean()) == pytest.approx(0.5, abs=4 / math.sqrt(12 * 1e5)) and float(
        u.var()
    ) == pytest.approx(1 / 12, abs=2e-3)
    for lag in (1, 2, 7):
        assert abs(float(torch.corrcoef(torch.stack([u[:-lag], u[lag:]]))[0, 1])) < 4 / math.sqrt(
            1e5
        )
    assert chi_square(torch.histc(u, 50, 0, 1), torch.full((50,), 0.02, dtype=torch.float64)) < 4
    pairs = (u[::2] * 8).long() * 8 + (u[1::2] * 8).long()
    assert (
        chi_square(
            torch.bincount(pairs, minlength=64).double(),
            torch.full((64,), 1 / 64, dtype=torch.float64),
        )
        < 4
    )


def test_uniform_differs_between_neighbouring_samples() -> None:
    """Samples of a group have seeds (key, 0), (key, 1), ...: at every position their numbers are
    unrelated.
    """
    seeds = torch.tensor([seed_of(7, i) for i in range(2000)])
    at = [uniform(seeds, torch.full((2000,), t)) for t in range(3)]
    for u in at:
        assert float(u.mean()) == pytest.approx(0.5, abs=0.03) and len(set(u.tolist())) == 2000
        assert abs(float(torch.corrcoef(torch.stack([u[:-1], u[1:]]))[0, 1])) < 0.1
    assert abs(float(torch.corrcoef(torch.stack([at[0], at[1]]))[0, 1])) < 0.1


LOGITS = 2 * torch.randn(40, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_frequencies_are_the_softmax(temperature: float) -> None:
    count = 20_000
    picked, logprobs = draw(
        LOGITS.expand(count, -1), torch.full((count,), temperature), stream(count, 5)
    )
    p = (LOGITS.double() / temperature).softmax(-1)
    assert chi_square(torch.bincount(picked, minlength=40).double(), p) < 4
    torch.testing.assert_close(logprobs.double(), p.log()[picked], atol=2e-6, rtol=0)


def expected_support(z: Tensor, top_p: float, top_k: int, min_p: float) -> Tensor:
    """Token by token in Python: which tokens may be drawn."""
    p = z.double().softmax(-1).tolist()
    order = sorted(range(len(p)), key=lambda i: -p[i])
    left = order[: top_k or None]
    whole = sum(p[i] for i in left)
    kept = []
    before = 0.0
    for rank, i in enumerate(left):
        if rank == 0 or (before < top_p * whole and p[i] >= min_p * p[order[0]]):
            kept.append(i)
        before += p[i]
    return torch.tensor([i in kept for i in range(len(p))])


FILTERS = [
    (0.9, 0, 0.0),
    (0.3, 0, 0.0),
    (1.0, 5, 0.0),
    (1.0, 1, 0.0),
    (1.0, 0, 0.2),
    (0.8, 6, 0.05),
    (1.0, 0, 0.0),
    (0.0, 0, 0.0),
    (1.0, 100, 0.0),
]


@pytest.mark.parametrize(("top_p", "top_k", "min_p"), FILTERS)
def test_filters_keep_what_they_should(top_p: float, top_k: int, min_p: float) -> None:
    generator = torch.Generator().manual_seed(0)
    z = 2 * torch.randn(50, 40, generator=generator)
    settings = (torch.full((50,), top_p), torch.full((50,), top_k), torch.full((50,), min_p))
    kept = keep_top(z, *settings)
    want = torch.stack([expected_support(row, top_p, top_k, min_p) for row in z])
    assert torch.equal(kept.isfinite(), want) and torch.equal(kept[want], z[want])


@pytest.mark.parametrize(
    ("top_p", "top_k", "min_p"),
    [(0.9, 20, 0.0), (0.8, 20, 0.01), (0.5, 7, 0.2), (0.95, 0, 0.05), (1.0, 5, 0.3)],
)
def test_filters_together_are_those_of_transformers(top_p: float, top_k: int, min_p: float) -> None:
    """Its processors in its order, each on what the one before has left."""
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    z = torch.randn(200, 60, generator=torch.Generator().manual_seed(4), dtype=torch.float64) * 1.5
    want = z
    for warp in (
        TopKLogitsWarper(top_k) if top_k else None,
        TopPLogitsWarper(top_p),
        MinPLogitsWarper(min_p),
    ):
        want = want if warp is None else warp(None, want)  # type: ignore[arg-type]
    fill = lambda v: torch.full((200,), v, dtype=torch.float64)  # noqa: E731
    kept = keep_top(z, fill(top_p), torch.full((200,), top_k), fill(min_p))
    assert torch.equal(kept, want)


@pytest.mark.parametrize(("top_p", "top_k", "min_p"), FILTERS[:6])
def test_filtered_frequencies_are_renormalised(top_p: float, top_k: int, min_p: float) -> None:
    count = 10_000
    fill = lambda v: torch.full((count,), v)  # noqa: E731
    picked, logprobs = draw(
        LOGITS.expand(count, -1),
        fill(0.8),
        stream(count, 6),
        (fill(top_p), fill(top_k), fill(min_p)),
    )
    z = LOGITS / 0.8
    support = expected_support(z, top_p, top_k, min_p)
    p = z.double().masked_fill(~support, float("-inf")).softmax(-1)
    counts = torch.bincount(picked, minlength=40).double()
    assert float(counts[~support].sum()) == 0
    if int(support.sum()) > 1:
        assert chi_square(counts, p) < 4
    # what is reported is the full distribution's, whatever was filtered
    full = z.double().log_softmax(-1)
    torch.testing.assert_close(logprobs.double(), full[picked], atol=2e-6, rtol=0)


def test_rows_have_their_own_settings() -> None:
    """A greedy row, a filtered row and a free row in one batch do not disturb each other."""
    logits = torch.stack([LOGITS, LOGITS, LOGITS, LOGITS])
    temperatures = torch.tensor([0.0, 0.8, 1.0, 1.7])
    u = torch.tensor([0.999, 0.999, 0.999, 0.3], dtype=torch.float64)
    filters = (torch.tensor([1.0, 0.01, 1.0, 1.0]), torch.tensor([0, 0, 0, 3]), torch.zeros(4))
    together = draw(logits, temperatures, u, filters)
    top = int(LOGITS.argmax())
    assert together[0][:2].tolist() == [top, top] and together[0][2] != top
    # greedy reports temperature 1
    assert float(together[1][0]) == pytest.approx(float(LOGITS.log_softmax(-1)[top]), abs=1e-6)
    for i in range(4):
        alone = draw(
            logits[i : i + 1],
            temperatures[i : i + 1],
            u[i : i + 1],
            tuple(f[i : i + 1] for f in filters),
        )  # type: ignore[arg-type]
        assert alone[0][0] == together[0][i] and alone[1][0] == together[1][i]


def test_edges_of_the_unit_interval() -> None:
    """u = 0 and u just below 1 never pick a token of probability 0."""
    logits = torch.tensor([[-math.inf, 0.0, 0.0, -math.inf]] * 4)
    u = torch.tensor([0.0, 0.25, 0.75, 1 - 2.0**-53], dtype=torch.float64)
    picked, logprobs = draw(logits, torch.ones(4), u)
    assert picked.tolist() == [1, 1, 2, 2] and logprobs.tolist() == pytest.approx(
        [-math.log(2)] * 4
    )
    huge = torch.tensor([[200.0, -200.0, 0.0]])
    picked, logprobs = draw(huge, torch.ones(1), torch.tensor([0.5], dtype=torch.float64))
    assert picked.tolist() == [0] and logprobs.tolist() == [0.0]


def test_ties_and_the_border_of_the_nucleus() -> None:
    """Four tokens of exactly a quarter: top_p 0.5 is reached by two of them."""
    kept = keep_top(
        torch.zeros(3, 4),
        torch.tensor([0.5, 0.51, 0.25]),
        torch.zeros(3, dtype=torch.int64),
        torch.zeros(3),
    )
    assert kept.isfinite().sum(-1).tolist() == [2, 3, 1]


def test_a_filter_that_is_off_drops_nothing_from_a_large_vocabulary() -> None:
    """Rounding pushes float32 sums past 1 before the last token: a free row beside a filtered one
    must not lose its tail.
    """
    z = torch.randn(4, 150_000, generator=torch.Generator().manual_seed(0))
    kept = keep_top(
        z, torch.tensor([1.0, 1.0, 1.0, 0.9]), torch.zeros(4, dtype=torch.int64), torch.zeros(4)
    )
    assert torch.equal(kept[:3], z[:3]) and not torch.equal(kept[3], z[3])
