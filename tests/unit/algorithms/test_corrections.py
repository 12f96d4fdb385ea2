from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reinforge.algorithms.parts.corrections import (
    CORRECTIONS,
    finish,
    icepop,
    mis,
    mismatch,
    none,
    seq_mask,
    seq_tis,
    statistics,
    tis,
)
from reinforge.backends.microbatch import combine
from reinforge.core.metrics import Metric

LN = math.log


def logs(*ratios: float) -> Tensor:
    return torch.tensor(ratios, dtype=torch.float64).log()


def zeros(n: int) -> Tensor:
    return torch.zeros(n, dtype=torch.float64)


def test_token_corrections() -> None:
    trainer = logs(1.0, 0.5, 3.0, 2.0) - 1
    behaviour = torch.full((4,), -1.0, dtype=torch.float64)
    assert none(trainer, behaviour)[0].tolist() == [1.0] * 4
    weights, metrics = tis(trainer, behaviour, cap=2.5)
    assert weights.tolist() == pytest.approx([1.0, 0.5, 2.5, 2.0]) and metrics[
        "truncated"
    ].tolist() == [0, 0, 1, 0]
    weights, metrics = tis(trainer, behaviour, cap=2.5, floor=0.7)
    assert weights.tolist() == pytest.approx([1.0, 0.7, 2.5, 2.0]) and metrics[
        "truncated"
    ].tolist() == [0, 1, 1, 0]
    weights, metrics = mis(trainer, behaviour, cap=2.5)
    assert weights.tolist() == pytest.approx([1.0, 0.5, 0.0, 2.0]) and metrics[
        "dropped"
    ].tolist() == [0, 0, 1, 0]
    huge = torch.tensor([200.0, -200.0])
    assert mis(huge, torch.zeros(2))[0][0] == 0 and tis(huge, torch.zeros(2))[
        0
    ].tolist() == pytest.approx([2.0, 0.0], abs=1e-8)


def test_icepop_drops_on_both_sides() -> None:
    weights, metrics = icepop(logs(0.4, 0.51, 1.0, 4.9, 5.1), zeros(5))
    assert weights.tolist() == pytest.approx([0.0, 0.51, 1.0, 4.9, 0.0]) and metrics[
        "dropped"
    ].tolist() == [1, 0, 0, 0, 1]
    assert icepop(logs(0.9, 1.2), zeros(2), cap=1.1, floor=0.95)[0].tolist() == [0.0, 0.0]


def test_sequence_corrections() -> None:
    """Rows with ratios (2, 1.5), (0.5, 0.5) and (1.25,): products 3, 1/4 and 1.25."""
    trainer = logs(2.0, 0.5, 1.5, 0.5, 1.25)
    sequence = torch.tensor([7, 2, 7, 2, 0])
    weights, metrics = seq_tis(trainer, zeros(5), sequence, cap=2.0)
    assert weights.tolist() == pytest.approx([2.0, 0.25, 2.0, 0.25, 1.25]) and metrics[
        "truncated"
    ].tolist() == [1, 0, 1, 0, 0]
    weights, metrics = seq_mask(trainer, zeros(5), sequence, cap=2.0)
    assert weights.tolist() == pytest.approx([0.0, 0.25, 0.0, 0.25, 1.25]) and metrics[
        "dropped"
    ].tolist() == [1, 0, 1, 0, 0]
    weights, metrics = seq_mask(trainer, zeros(5), sequence, cap=4.0, floor=0.5)
    assert weights.tolist() == pytest.approx([3.0, 0.0, 3.0, 0.0, 1.25]) and metrics[
        "dropped"
    ].tolist() == [0, 1, 0, 1, 0]
    weights, _ = seq_tis(trainer, zeros(5), sequence, cap=2.0, geometric=True)
    assert weights.tolist() == pytest.approx([3**0.5, 0.5, 3**0.5, 0.5, 1.25])


@pytest.mark.parametrize("name", list(CORRECTIONS))
def test_of_one_token_rows_sequence_is_token(name: str) -> None:
    pairs = {"seq_tis": tis, "seq_mask": mis}
    trainer = logs(0.3, 1.0, 1.9, 2.1, 50.0)
    token = pairs.get(name, CORRECTIONS[name])(trainer, zeros(5))[0]
    assert CORRECTIONS[name](trainer, zeros(5), torch.arange(5))[0].tolist() == pytest.approx(
        token.tolist(), rel=1e-12
    )


@pytest.mark.parametrize("name", list(CORRECTIONS))
def test_without_mismatch_every_weight_is_one_and_none_has_a_gradient(name: str) -> None:
    trainer = torch.tensor([-1.0, -2.0, -0.1], requires_grad=True)
    weights, metrics = CORRECTIONS[name](trainer, trainer.detach(), torch.tensor([0, 0, 1]))
    assert (
        weights.tolist() == [1.0] * 3
        and not weights.requires_grad
        and not any(m.requires_grad for m in metrics.values())
    )
    assert all(metrics[k].sum() == 0 for k in ("truncated", "dropped") if k in metrics)


@pytest.mark.parametrize("name", list(CORRECTIONS))
def test_extremes_and_nothing(name: str) -> None:
    """A row of 1000 tokens that are each e^5 more likely: the product is e^5000, the
    weight finite.
    """
    n = 1000
    for step in (5.0, -5.0, 300.0, -300.0):
        weights, metrics = CORRECTIONS[name](
            torch.full((n,), step), torch.zeros(n), torch.zeros(n, dtype=torch.int64)
        )
        assert weights.isfinite().all() and all(m.isfinite().all() for m in metrics.values())
        if name in ("mis", "seq_mask", "icepop") and step > 0:
            assert weights.sum() == 0
    weights, metrics = CORRECTIONS[name](
        torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    )
    assert weights.shape == (0,) and all(m.shape == (0,) for m in metrics.values())


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from(list(CORRECTIONS)))
def test_neither_the_order_of_rows_nor_the_cut_matters(data: st.DataObject, name: str) -> None:
    lengths = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any))
    order = data.draw(st.permutations(range(len(lengths))))
    size = data.draw(st.integers(1, len(lengths)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    rows = [0.5 * torch.randn(n, generator=generator) for n in lengths]

    def run(picked: list[int]) -> dict[int, list[float]]:
        sequence = torch.repeat_interleave(
            torch.arange(len(picked)), torch.tensor([lengths[i] for i in picked])
        )
        trainer = torch.cat([rows[i] for i in picked])
        weights, _ = CORRECTIONS[name](trainer, torch.zeros_like(trainer), sequence)
        return {i: weights[sequence == s].tolist() for s, i in enumerate(picked)}

    parts: dict[int, list[float]] = {}
    for start in range(0, len(order), size):
        parts |= run(list(order[start : start + size]))
    assert parts == run(list(range(len(lengths))))


def test_mismatch_statistics() -> None:
    """Ratios 1, 1/2, 3, 2: mean 6.5/4, mean square 14.25/4, ess = 6.5^2 / (4 * 14.25)."""
    trainer = logs(1.0, 0.5, 3.0, 2.0)
    behaviour = zeros(4)
    s = statistics(trainer, behaviour)
    assert (
        s["mismatch/ess"] == pytest.approx(6.5**2 / (4 * 14.25))
        and "mismatch/ratio_squared" not in s
    )
    assert s["mismatch/mean"] == pytest.approx((LN(2) + LN(3) + LN(2)) / 4) and s[
        "mismatch/max"
    ] == pytest.approx(LN(3))
    assert s["mismatch/ratio/min"] == pytest.approx(0.5) and s[
        "mismatch/ratio/max"
    ] == pytest.approx(3.0)
    assert s["mismatch/outside_2x"] == 0.25  # 3 only: 1/2 and 2 are on the edge
    assert s["mismatch/ratio/p50"] == pytest.approx(1.5)  # of 0.5, 1, 2, 3
    assert s["mismatch/ratio/p95"] == pytest.approx(2 + 0.85)
    assert statistics(trainer[:0], behaviour[:0]) == mismatch(trainer[:0], behaviour[:0], 4) == {}


def test_statistics_of_sequences_and_of_a_correction() -> None:
    """Rows (2, 1.5), (0.5, 0.5), (1.25): sequence ratios 3, 1/4, 5/4, each counted once; weights 2,
    2, 1/4, 1/4, 5/4 of seq_tis.
    """
    trainer = logs(2.0, 0.5, 1.5, 0.5, 1.25)
    sequence = torch.tensor([7, 2, 7, 2, 0])
    s = statistics(trainer, zeros(5), sequence, partial(seq_tis, cap=2.0))
    assert s["mismatch/sequence_ess"] == pytest.approx(4.5**2 / (3 * (9 + 1 / 16 + 25 / 16)))
    assert s["mismatch/sequence_ratio/p50"] == pytest.approx(1.25) and s[
        "mismatch/sequence_ratio/p95"
    ] == pytest.approx(1.25 + 0.9 * 1.75)
    assert s["mismatch/truncated"] == pytest.approx(0.4) and s["mismatch/weight"] == pytest.approx(
        5.75 / 5
    )
    assert s["mismatch/weight_ess"] == pytest.approx(5.75**2 / (5 * (8 + 2 / 16 + 25 / 16)))
    assert s["mismatch/weight/p50"] == pytest.approx(1.25) and s[
        "mismatch/weight/p01"
    ] == pytest.approx(0.25)
    assert not [name for name in s if name.endswith("_squared")]
    s = statistics(trainer, zeros(5), sequence, partial(mis, cap=1.75))
    assert s["mismatch/dropped"] == pytest.approx(0.2) and s["mismatch/weight"] == pytest.approx(
        3.75 / 5
    )
    assert "mismatch/weight_ess" not in statistics(trainer, zeros(5), sequence, none)


def test_everything_dropped_has_no_effective_sample_size() -> None:
    s = statistics(logs(9.0, 9.0), zeros(2), torch.tensor([0, 1]), seq_mask)
    assert (
        s["mismatch/dropped"] == 1.0
        and s["mismatch/weight"] == 0.0
        and "mismatch/weight_ess" not in s
    )


def test_mismatch_adds_up_over_micro_batches() -> None:
    trainer = logs(1.0, 0.5, 3.0, 1.9)
    behaviour = zeros(4)
    parts = [mismatch(trainer[i], behaviour[i], 4) for i in (slice(0, 1), slice(1, 4))]
    summed = combine(parts)
    whole = statistics(trainer, behaviour)
    assert finish(summed) == pytest.approx({k: v for k, v in whole.items() if "/p" not in k})
    assert finish({"policy/loss": Metric(1.0)}) == {"policy/loss": 1.0}
