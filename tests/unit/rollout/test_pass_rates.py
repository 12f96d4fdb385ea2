"""The pass-rate store against numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from reinforge.core.backend import State
from reinforge.core.errors import InputError
from reinforge.core.sample import Group, Row, Sample
from reinforge.rollout.rows.pass_rates import PassRateBands, PassRates

IDS = [f"r{i}" for i in range(5)]


def visit(row: int, rewards: Sequence[float | None]) -> Group:
    samples = [
        Sample.from_tokens(f"{row}#{i}", [1, 5], [False, True], group=str(row), reward=r)
        for i, r in enumerate(rewards)
    ]
    return Group(Row(IDS[row], "p"), samples, [""] * len(samples))


def test_the_estimate_forgets() -> None:
    """4 of 8, then 8 of 8, at decay 1/2: weight 1/2·8 + 8 = 12, hits 1/2·4 + 8 = 10; then 0 of 2:
    weight 8, hits 5.
    """
    rates = PassRates(IDS, decay=0.5)
    assert rates.rate(2) is None
    rates.observe([visit(2, [1, 0] * 4)], 0)
    assert rates.rate(2) == 0.5
    rates.observe([visit(2, [1] * 8)], 3)
    assert rates.rate(2) == 10 / 12
    rates.observe([visit(2, [0, 0])], 7)
    assert rates.rate(2) == 5 / 8
    assert (int(rates.attempts[2]), float(rates.successes[2]), int(rates.last[2])) == (18, 12.0, 7)
    assert rates.rate(1) is None and int(rates.last[1]) == -1
    now = PassRates(IDS, decay=0.0)
    ever = PassRates(IDS, decay=1.0)
    for store in (now, ever):
        store.observe([visit(0, [1] * 4), visit(0, [0] * 4)], 0)
    assert now.rate(0) == 0.0 and ever.rate(0) == 0.5


def test_what_counts_as_a_success() -> None:
    share = PassRates(IDS, best=2.0)  # a share of the best total, cut to [0, 1]
    share.observe([visit(0, [2.0, 1.0, 3.0, -1.0, None])], 0)
    assert int(share.attempts[0]) == 4 and share.rate(0) == (1 + 0.5 + 1 + 0) / 4
    threshold = PassRates(IDS, success_at=1.0)
    threshold.observe([visit(0, [2.0, 1.0, 0.99, None])], 0)
    assert threshold.rate(0) == 2 / 3
    threshold.observe([visit(1, [None, None])], 4)
    assert (
        threshold.rate(1) is None
        and int(threshold.last[1]) == 4
        and threshold.status(1) == "unknown"
    )


def test_bands_and_shares() -> None:
    """Of 5 rows: one solved, one hopeless, one teachable, one with too few samples, one
    never seen.
    """
    rates = PassRates(IDS, bands=PassRateBands(solved=0.75, hopeless=0.25, min_attempts=4))
    rates.observe(
        [
            visit(0, [1, 1, 1, 0]),
            visit(1, [0, 0, 0, 1]),
            visit(2, [1, 0, 1, 0]),
            visit(3, [1, 1, 1]),
        ],
        0,
    )
    assert [rates.status(i) for i in range(5)] == [
        "solved",
        "hopeless",
        "teachable",
        "unknown",
        "unknown",
    ]
    want = {
        "known": 0.6,
        "retired": 0.2,
        "hopeless": 0.2,
        "teachable": 0.2,
        "pass_rate": (0.75 + 0.25 + 0.5) / 3,
    }
    assert rates.report() == pytest.approx(
        {f"sampling/{name}": value for name, value in want.items()}
    )
    assert PassRates(IDS).report() == {
        f"sampling/{name}": 0.0 for name in ("known", "retired", "hopeless", "teachable")
    }


def test_the_state_is_exact_and_holds_only_what_was_seen() -> None:
    rates = PassRates(IDS, decay=0.3)
    rates.observe([visit(3, [1, 0, 0]), visit(1, [1])], 5)
    saved = rates.state()
    assert (
        saved.tensors["rows"].tolist() == [1, 3]
        and all(t.shape == (2,) for t in saved.tensors.values())
        and saved.meta == {"n": 5}
    )
    other = PassRates(IDS, decay=0.3)
    other.observe([visit(0, [1] * 9)], 1)  # what it knew before is gone
    other.load(State({name: t.clone() for name, t in saved.tensors.items()}, dict(saved.meta)))
    for store in (rates, other):
        store.observe([visit(3, [1, 1])], 6)
    assert other.rate(3) == rates.rate(3) == (0.3 * 1 + 2) / (0.3 * 3 + 2) and other.rate(0) is None
    again = other.state()
    assert all(torch.equal(again.tensors[name], t) for name, t in rates.state().tensors.items())
    with pytest.raises(InputError, match="pass rates of 5 rows, now there are 4"):
        PassRates(IDS[:4]).load(saved)
