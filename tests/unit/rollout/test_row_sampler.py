"""Which rows are taken: shares worked out by hand, the same choice again after a restore, and an
end in every case.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import pytest

from helpers.fake_engine import FakeEngine
from helpers.group_source import take_batch
from helpers.toys import run
from reinforge.core.engine import Sampling
from reinforge.core.errors import InputError
from reinforge.core.sample import Row
from reinforge.data.cursor import Cursor
from reinforge.rewards.function import FunctionReward
from reinforge.rollout.players.single_turn import SingleTurn
from reinforge.rollout.rows.curriculum import (
    DeclaredDifficulty,
    LearnedDifficulty,
    QuantileRamp,
    difficulties,
)
from reinforge.rollout.rows.pass_rates import PassRateBands, PassRates
from reinforge.rollout.rows.sampler import RowSampler, TeachableWeighting, coin
from reinforge.rollout.source import GroupSource, has_signal, rollout_metrics


def store(rates: Sequence[float | None], **kw: float) -> PassRates:
    """A store that has these estimates, from 100 samples each; None: a row that was never tried."""
    made = PassRates(
        [f"r{i}" for i in range(len(rates))], bands=PassRateBands(**kw) if kw else PassRateBands()
    )  # type: ignore[arg-type]
    for i, p in enumerate(rates):
        if p is not None:
            made.attempts[i], made.weight[i], made.hits[i], made.last[i] = 100, 100.0, 100.0 * p, 0
    return made


def test_without_policies_it_is_the_cursor() -> None:
    row_sampler = RowSampler(Cursor(7, 3, True), 0)
    plain = Cursor(7, 3, True)
    for k in (4, 5, 1):
        first = plain.taken
        assert [(c.position, c.row) for c in row_sampler.take(k)] == [
            (first + i, row) for i, row in enumerate(plain.take(k))
        ]


def test_probabilities() -> None:
    """Unknown 1; solved and hopeless `recheck`; otherwise 4p(1-p), at least `recheck`."""
    teachable = TeachableWeighting(store([None, 1.0, 0.0, 0.5, 0.9, 0.95, 0.01]), recheck=0.1)
    assert [teachable.weigh(i, 0) for i in range(7)] == pytest.approx(
        [1.0, 0.1, 0.1, 1.0, 0.36, 0.1, 0.1]
    )
    few = store([1.0])
    few.attempts[0] = 7  # one short of known
    assert TeachableWeighting(few, 0.1).weigh(0, 0) == 1.0


def test_the_coin_is_fair_and_a_function_of_seed_and_position() -> None:
    flips = [coin(0, i) for i in range(4000)]
    assert sum(flips) / 4000 == pytest.approx(0.5, abs=4 * (1 / 12 / 4000) ** 0.5) and all(
        0 <= c < 1 for c in flips
    )
    for p in (0.05, 0.36):
        assert sum(c < p for c in flips) / 4000 == pytest.approx(
            p, abs=4 * (p * (1 - p) / 4000) ** 0.5
        )
    assert flips[:50] == [coin(0, i) for i in range(50)] != [coin(1, i) for i in range(50)]


def test_accepted_shares() -> None:
    """100 rows each of p = 1, 0, 1/2, 0.9, unknown: of 20 epochs 0.05, 0.05, 1, 0.36, 1 are taken,
    within 4 standard deviations.
    """
    groups = [1.0, 0.0, 0.5, 0.9, None]
    cursor = Cursor(500, 0, True)
    row_sampler = RowSampler(
        cursor, 5, [TeachableWeighting(store([groups[i % 5] for i in range(500)]))]
    )
    taken: Counter[int] = Counter()
    while cursor.taken < 20 * 500:
        taken.update(c.row % 5 for c in row_sampler.take(1))
    for kind, share in enumerate([0.05, 0.05, 1.0, 0.36, 1.0]):
        assert taken[kind] / 2000 == pytest.approx(
            share, abs=4 * (share * (1 - share) / 2000) ** 0.5 + 1 / 2000
        )


def test_the_choice_is_repeated_after_a_restore() -> None:
    rates = store([i / 40 for i in range(41)])
    cursor = Cursor(41, 0, True)
    row_sampler = RowSampler(cursor, 9, [TeachableWeighting(rates)])
    row_sampler.take(13)
    at = cursor.state()
    first = row_sampler.take(20)
    fresh = Cursor(41, 0, True)
    fresh.load(at)
    assert RowSampler(fresh, 9, [TeachableWeighting(rates)]).take(20) == first
    fresh.load(at)
    assert [c.row for c in RowSampler(fresh, 10, [TeachableWeighting(rates)]).take(20)] != [
        c.row for c in first
    ]
    assert len({c.position for c in first}) == 20


def test_it_ends_even_where_nothing_is_wanted() -> None:
    """All solved and never looked at again: after two epochs of refusals rows come in the cursor's
    order. With a little hope, after one.
    """
    cursor = Cursor(6, 0, False)
    assert [
        c.row
        for c in RowSampler(cursor, 0, [TeachableWeighting(store([1.0] * 6), recheck=0.0)]).take(4)
    ] == [0, 1, 2, 3]
    assert cursor.taken == 12 + 4
    cursor = Cursor(6, 0, False)
    chosen = RowSampler(cursor, 0, [TeachableWeighting(store([1.0] * 6), recheck=1e-12)]).take(4)
    assert [c.row for c in chosen] == [0, 1, 2, 3] and cursor.taken == 6 + 4


# curricula


def test_a_declared_curriculum_by_hand() -> None:
    """Ten rows of difficulty 9..0, from a fifth to all in 8 steps: at step t the (2 + t) easiest;
    policies multiply.
    """
    policy = DeclaredDifficulty([9.0 - i for i in range(10)], QuantileRamp(0.2, 1.0, 8))
    for step in range(12):
        allowed = [i for i in range(10) if policy.weigh(i, step)]
        assert allowed == list(range(10))[-min(10, 2 + step) :]
    assert policy.report(4) == pytest.approx(
        {"sampling/quantile": 0.6, "sampling/difficulty_limit": 5.0}
    )
    row_sampler = RowSampler(
        Cursor(10, 0, False),
        0,
        [policy, TeachableWeighting(store([0.5] * 8 + [1.0, 0.5]), recheck=0.0)],
    )
    # 7, 8, 9 are allowed, and 8 is solved
    assert [c.row for c in row_sampler.take(3, step=1)] == [7, 9, 7]


def test_ties_and_a_step_full_of_rows_are_always_allowed() -> None:
    tied = DeclaredDifficulty([1.0, 1.0, 2.0, 3.0], QuantileRamp(0.0, 1.0, 10))
    assert [tied.weigh(i, 0) for i in range(4)] == [1, 1, 0, 0]
    enough = DeclaredDifficulty([1.0, 2.0, 3.0, 4.0], QuantileRamp(0.0, 1.0, 10, least=3))
    assert [enough.weigh(i, 0) for i in range(4)] == [1, 1, 1, 0] and enough.weigh(3, 10) == 1


def test_a_learned_curriculum_starts_with_what_is_easy() -> None:
    """Known pass rates 0.9, 0.5, 0.1, 0.0: a quarter allows the first, half the second; unknown
    rows are always allowed.
    """
    policy = LearnedDifficulty(store([0.9, 0.5, 0.1, 0.0, None]), QuantileRamp(0.25, 1.0, 3))
    assert [[policy.weigh(i, step) for i in range(5)] for step in (0, 1, 3)] == [
        [1, 0, 0, 0, 1],
        [1, 1, 0, 0, 1],
        [1, 1, 1, 1, 1],
    ]
    nothing = LearnedDifficulty(store([None, None]), QuantileRamp(0.0, 1.0, 3))
    assert nothing.weigh(0, 0) == 1.0 and nothing.report(0) == {"sampling/quantile": 0.0}


@pytest.mark.parametrize(
    "columns",
    [{}, {"level": "hard"}, {"level": True}, {"level": math.nan}, {"level": None}],
    ids=str,
)
def test_difficulty_must_be_a_number(columns: dict) -> None:
    rows = [Row("a", "p", {"level": 1}), Row("b", "p", {"level": 2.5}), Row("c", "p", columns)]
    assert difficulties(rows[:2], "level") == [1.0, 2.5]
    with pytest.raises(InputError, match=r"sampling.curriculum.column, row c: level"):
        difficulties(rows, "level")


# a bandit: rows of known pass rates, and what a policy spends on which


def bandit(
    kinds: Sequence[float], prefer: bool, steps: int
) -> tuple[Counter[float], int, dict[str, float]]:
    """(groups per pass rate, groups with signal, metrics of the last step) of `steps` steps of 10
    prompts on 10 rows of each kind. The engine's first token is uniform over 64; it passes when it
    is below 64 p.
    """
    rows = [Row(f"r{i}", f"p{i}", {"p": p}) for i, p in enumerate(kinds * 10)]

    def passes(completions: list[str], p: list[float]) -> list[float]:
        return [float(ord(c) < 64 * q) for c, q in zip(completions, p, strict=True)]

    engine = FakeEngine(vocabulary=64)
    rollout = SingleTurn(
        engine,
        lambda row: [5],
        engine.decode,
        [FunctionReward("passes", passes, pure=True)],
        Sampling(1),
        n=8,
        seed=0,
    )
    rates = PassRates([row.id for row in rows], decay=0.5)
    cursor = Cursor(len(rows), 0, True)
    source = GroupSource(
        rows,
        cursor,
        rollout,
        10,
        row_sampler=RowSampler(cursor, 0, [TeachableWeighting(rates)] if prefer else []),
        passrates=rates,
    )
    spent: Counter[float] = Counter()
    signal = 0
    for step in range(steps):
        batch = run(take_batch(source, step))
        spent.update(g.row.columns["p"] for g in batch.groups)
        signal += sum(map(has_signal, batch.groups))
    return spent, signal, rollout_metrics(batch, {})


def test_a_teachable_preference_spends_little_on_what_cannot_teach() -> None:
    """A third each of p = 0, 1/2, 1.

    In order, two thirds of the groups teach nothing. With the preference the 30 rows are tried once
    (3 steps); from then on a sterile row is taken with 0.05 and a row of 1/2 with E[4 p' (1 - p')]
    = 1 - 1/n', n' from 8 to 24 effective samples, so the sterile share is 0.1 / (0.1 +
    0.875..0.958) = 0.094..0.103.
    """
    kinds = [0.0, 0.5, 1.0]
    plain, plain_signal, metrics = bandit(kinds, False, 9)
    assert (
        plain == {0.0: 30, 0.5: 30, 1.0: 30}
        and plain_signal <= 30
        and "sampling/skipped" not in metrics
    )
    spent, signal, metrics = bandit(kinds, True, 33)
    # 10 of each kind in the first three steps, when nothing was known
    later = {p: n - 10 for p, n in spent.items()}
    assert sum(later.values()) == 300
    assert (later[0.0] + later[1.0]) / 300 == pytest.approx(
        0.098, abs=4 * (0.098 * 0.902 / 300) ** 0.5
    )
    # a group of 8 at 1/2 is all equal with 2/256
    assert spent[0.5] - signal < 8 and signal / 330 > 2.3 * plain_signal / 90
    assert metrics["sampling/known"] == 1.0 and metrics["sampling/retired"] == pytest.approx(
        1 / 3, abs=0.04
    )
    assert 0.4 < metrics["sampling/skipped"] < 0.85 and metrics[
        "sampling/pass_rate"
    ] == pytest.approx(0.5, abs=0.1)
