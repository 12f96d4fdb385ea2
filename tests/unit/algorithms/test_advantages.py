from __future__ import annotations

import math
import statistics
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reinforge.algorithms.parts.advantages import (
    ADVANTAGES,
    AdvantageOptions,
    Rollouts,
    group_relative,
)
from reinforge.algorithms.parts.shaping import overlong_penalty
from reinforge.core.batch import Batch
from reinforge.core.errors import InputError
from reinforge.core.sample import Sample, Stop

NAN = float("nan")


def rollouts(rewards, group, episode=None, lengths=None, dtype=torch.float64) -> Rollouts:
    n = len(rewards)
    lengths = torch.tensor(lengths or [1] * n)
    return Rollouts(
        torch.tensor(rewards, dtype=dtype),
        torch.tensor(group),
        torch.tensor(episode or list(range(n))),
        torch.repeat_interleave(torch.arange(n), lengths),
        lengths,
    )


def advantages(*args, **options) -> list[float]:
    return group_relative(rollouts(*args), AdvantageOptions(**options)).tolist()


def test_golden_group_scaling() -> None:
    """Rewards 1, 0, 0, 1: mean 1/2, sample std sqrt(1/3), population std 1/2.

    Rewards 0, 3: mean 3/2, sample std 3/sqrt(2).
    """
    a = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    b = 1.5 / (3 / math.sqrt(2) + 1e-4)
    assert advantages([1.0, 0.0, 0.0, 1.0, 0.0, 3.0], [0, 0, 0, 0, 7, 7]) == pytest.approx(
        [a, -a, -a, a, -b, b], abs=1e-15
    )
    assert a == pytest.approx(0.8658754, abs=1e-7)
    population = 0.5 / (0.5 + 1e-4)
    assert advantages([1.0, 0.0, 0.0, 1.0], [0] * 4, std="population") == pytest.approx(
        [population, -population, -population, population]
    )
    assert advantages([0.0, 1.0], [0, 0], eps=1.0)[1] == pytest.approx(0.5 / (math.sqrt(0.5) + 1.0))


def test_golden_batch_and_no_scaling() -> None:
    rewards = [1.0, 0.0, 4.0, 6.0]
    group = [0, 0, 1, 1]
    assert advantages(rewards, group, scale="none") == [0.5, -0.5, -1.0, 1.0]
    std = statistics.stdev(rewards) + 1e-4
    assert advantages(rewards, group, scale="batch") == pytest.approx(
        [0.5 / std, -0.5 / std, -1 / std, 1 / std], abs=1e-15
    )
    pstd = statistics.pstdev(rewards) + 1e-4
    assert advantages(rewards, group, scale="batch", std="population")[0] == pytest.approx(
        0.5 / pstd, abs=1e-15
    )


def test_every_token_of_a_row_gets_the_rows_advantage() -> None:
    values = group_relative(
        rollouts([1.0, 0.0], [0, 0], None, [2, 3]), AdvantageOptions(scale="none")
    )
    assert values.tolist() == [0.5, 0.5, -0.5, -0.5, -0.5]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_give_exactly_zero(scale: str) -> None:
    """Three times 0.1 has a mean that is not 0.1; the other group makes the batch's std large or
    small.
    """
    values = advantages([0.1, 0.1, 0.1, 1.0, 0.0], [0, 0, 0, 1, 1], scale=scale)
    assert values[:3] == [0.0, 0.0, 0.0] and values[3] > 0.4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_float_noise_is_not_amplified(dtype: torch.dtype) -> None:
    """Noise of 1e-7 on equal rewards stays below 1e-3 of a real signal; with eps 1e-8 it would be
    of size 1.
    """
    values = group_relative(
        rollouts([1.0, 1.0 + 1.2e-7, 1.0, 1.0], [0] * 4, dtype=dtype), AdvantageOptions()
    )
    assert values.dtype == dtype and 0 < values.abs().max() < 1.1e-3
    amplified = group_relative(
        rollouts([1.0, 1.0 + 1.2e-7, 1.0, 1.0], [0] * 4, dtype=dtype), AdvantageOptions(eps=1e-8)
    )
    assert amplified.abs().max() > 1


def test_large_offsets_lose_nothing() -> None:
    assert advantages([1e9, 1e9 + 1, 1e9, 1e9 + 1], [0] * 4) == pytest.approx(
        advantages([0.0, 1.0, 0.0, 1.0], [0] * 4), abs=1e-12
    )


def test_unscored_rows_get_zero_and_leave_statistics_alone() -> None:
    assert advantages([1.0, NAN, 0.0, NAN], [0, 0, 0, 1]) == pytest.approx(
        [*advantages([1.0, 0.0], [0, 0])[:1], 0.0, *advantages([1.0, 0.0], [0, 0])[1:], 0.0]
    )
    assert advantages([1.0, NAN], [0, 0]) == [0.0, 0.0]  # fewer than two are scored
    assert advantages([NAN, NAN], [0, 0], scale="batch") == [0.0, 0.0]
    assert advantages([5.0], [0], scale="none") == [0.0]


def test_forked_rows_count_once() -> None:
    """Episode 0 has three rows of reward 1; statistics must see rewards (1, 0), not (1,
    1, 1, 0).
    """
    forked = advantages([1.0, 1.0, 1.0, 0.0], [0] * 4, [0, 0, 0, 1])
    plain = advantages([1.0, 0.0], [0, 0])
    assert forked == [plain[0]] * 3 + [plain[1]]
    batch = advantages([1.0, 1.0, 0.0, 3.0, 5.0], [0, 0, 0, 1, 1], [0, 0, 1, 2, 3], scale="batch")
    assert batch[1:] == advantages([1.0, 0.0, 3.0, 5.0], [0, 0, 1, 1], scale="batch")


def test_rows_of_an_episode_must_agree() -> None:
    with pytest.raises(InputError, match="different rewards"):
        advantages([1.0, 0.5], [0, 0], [0, 0])
    with pytest.raises(InputError, match="different groups"):
        advantages([1.0, 1.0], [0, 1], [0, 0])


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(["group", "batch", "none"]))
def test_order_of_rows_does_not_change_a_bit(data: st.DataObject, scale: str) -> None:
    n = data.draw(st.integers(2, 12))
    rewards = data.draw(
        st.lists(st.one_of(st.floats(-3, 3), st.just(0.1), st.just(NAN)), min_size=n, max_size=n)
    )
    group = data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    order = data.draw(st.permutations(range(n)))
    straight = advantages(rewards, group, scale=scale)
    relabelled = {g: 100 - 7 * g for g in range(4)}
    shuffled = advantages(
        [rewards[i] for i in order], [relabelled[group[i]] for i in order], scale=scale
    )
    assert shuffled == [straight[i] for i in order]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.floats(-5, 5), min_size=2, max_size=6), min_size=1, max_size=4))
def test_groups_against_plain_python(groups: list[list[float]]) -> None:
    rewards = [r for g in groups for r in g]
    group = [i for i, g in enumerate(groups) for _ in g]
    expected = [
        0.0 if max(g) == min(g) else (r - statistics.fmean(g)) / (statistics.stdev(g) + 1e-4)
        for g in groups
        for r in g
    ]
    assert advantages(rewards, group) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def sample(uid: str, group: str, reward: float | None, trained: int, **kw) -> Sample:
    return Sample.from_tokens(
        uid,
        list(range(trained + 2)),
        [False, False] + [True] * trained,
        group=group,
        reward=reward,
        **kw,
    )


def test_rollouts_of_packs() -> None:
    """Groups are spread over two packs; a token's row is counted over all of them."""
    first = Batch.pack([sample("a", "x", 1.0, 2), sample("b", "y", None, 1)])
    second = Batch.pack(
        [
            sample(
                "c", "x", 0.0, 3, stop=Stop.LENGTH, token_rewards=torch.tensor([9.0, 9, 1, 2, 3])
            ),
            sample("d", "y", 2.0, 0),
        ]
    )
    r = Rollouts.of([first, second])
    assert r.rewards.nan_to_num(-1).tolist() == [1.0, -1.0, 0.0, 2.0] and r.group.tolist() == [
        0,
        1,
        0,
        1,
    ]
    assert r.sequence.tolist() == [0, 0, 1, 2, 2, 2] and r.lengths.tolist() == [2, 1, 3, 0]
    assert r.truncated is not None and r.truncated.tolist() == [False, False, True, False]
    assert r.token_rewards is not None and r.token_rewards.tolist() == [0, 0, 0, 1, 2, 3]
    assert r.streams["behaviour"].tolist() == [0.0] * 6
    # token rewards count in the statistics of the group
    assert r.totals.nan_to_num(-1).tolist() == [1.0, -1.0, 6.0, 2.0]
    assert group_relative(r, AdvantageOptions(scale="none")).tolist() == [
        -2.5,
        -2.5,
        0,
        2.5,
        2.5,
        2.5,
    ]
    assert r.baseline is None and r.bootstrap is None and r.components == {}


def test_rollouts_of_components_baseline_and_bootstrap() -> None:
    first = Batch.pack(
        [
            sample("a", "x", 1.0, 2, rewards={"fmt": 1.0, "ok": None}, baseline=0.25),
            sample("b", "x", 3.0, 1, rewards={"ok": 3.0}),
        ]
    )
    second = Batch.pack(
        [sample("c", "y", 2.0, 1, rewards={"ok": 2.0, "fmt": 0.0}, stop=Stop.LENGTH)]
    )
    first.bootstrap = torch.zeros(2)
    second.bootstrap = torch.tensor([0.75])
    r = Rollouts.of([first, second])
    assert list(r.components) == ["fmt", "ok"]
    assert r.components["fmt"].nan_to_num(-1).tolist() == [1, -1, 0] and r.components[
        "ok"
    ].nan_to_num(-1).tolist() == [-1, 3, 2]
    assert r.baseline is not None and r.baseline.nan_to_num(-1).tolist() == [0.25, -1, -1]
    assert r.bootstrap is not None and r.bootstrap.tolist() == [0, 0, 0.75]


def test_totals_are_of_the_episode() -> None:
    """Rows 0 and 2 are one episode: both get its reward 1 and all its token rewards, 1 + 2 + 4."""
    r = replace(
        rollouts([1.0, 0.0, 1.0, NAN], [0] * 4, [5, 6, 5, 7], [2, 1, 1, 1]),
        token_rewards=torch.tensor([1.0, 2, 8, 4, 16]),
    )
    assert r.totals.nan_to_num(-1).tolist() == [8.0, 8.0, 8.0, -1.0]
    assert group_relative(r, AdvantageOptions()).tolist() == [0.0] * 5
    more = r.with_token_rewards(torch.tensor([1.0, 0, 0, 0, 0]))
    assert more.totals[:3].tolist() == [9.0, 8.0, 9.0] and r.totals[0] == 8.0
    assert replace(r, token_rewards=None).with_token_rewards(torch.ones(5)).totals[:3].tolist() == [
        4.0,
        1.0,
        4.0,
    ]


def test_overlong_penalty_is_the_papers() -> None:
    """16384 free tokens, 4096 of buffer (2503.14476, section 4.1)."""
    values = [overlong_penalty(n, 20480, 4096) for n in (1, 16384, 16385, 18432, 20480, 30000)]
    assert values == [0.0, 0.0, -1 / 4096, -0.5, -1.0, -1.0]
    assert overlong_penalty(100, 100, 0) == 0.0


# the others, by hand


def by_name(name: str, r: Rollouts, **options) -> list[float]:
    values = ADVANTAGES[name](r, AdvantageOptions(**options))
    values = values["advantages"] if isinstance(values, dict) else values
    assert (
        values.shape == r.sequence.shape
        and values.dtype == r.rewards.dtype
        and bool(values.isfinite().all())
    )
    return values.tolist()


def test_batch_baseline() -> None:
    # one sample per prompt; the batch's mean is 2
    r = rollouts([1.0, 0.0, 4.0, NAN, 3.0], [0, 1, 2, 3, 4])
    assert by_name("batch_baseline", r) == [-1.0, -2.0, 2.0, 0.0, 1.0]
    std = statistics.stdev([1, 0, 4, 3]) + 1e-4
    assert by_name("batch_baseline", r, scale="batch") == pytest.approx(
        [-1 / std, -2 / std, 2 / std, 0.0, 1 / std], abs=1e-15
    )
    assert by_name("batch_baseline", rollouts([0.1] * 3, [0, 1, 2])) == [0.0] * 3


def test_leave_one_out() -> None:
    """1 - 1/2, 0 - 1, 1 - 1/2; a group of one has no other."""
    r = rollouts([1.0, 0.0, 1.0, NAN, 3.0], [0, 0, 0, 0, 1], None, [1, 2, 1, 1, 1])
    assert by_name("leave_one_out", r) == pytest.approx([0.5, -1.0, -1.0, 0.5, 0.0, 0.0])
    assert sum(
        by_name("leave_one_out", r, whiten=True)[i] for i in (0, 1, 2, 3, 5)
    ) == pytest.approx(0.0, abs=1e-12)


def test_group_whitened_is_over_tokens() -> None:
    """a = 1/2 (1 token), -1/2 (3 tokens), 0 (4 tokens of a group without signal): mean -1/8,
    squared deviations 7/8, sample variance 1/8. Over rows the mean would be 0 and the variance 1/6.
    """
    r = rollouts([1.0, 0.0, 2.0, 2.0, NAN], [0, 0, 1, 1, 1], None, [1, 3, 2, 2, 5])
    d = math.sqrt(1 / 8) + 1e-4
    want = [0.625 / d] + [-0.375 / d] * 3 + [0.125 / d] * 4 + [0.0] * 5
    assert by_name("group_whitened", r) == pytest.approx(want, abs=1e-14)
    assert by_name("group_whitened", r, std="population", eps=0.0)[0] == pytest.approx(
        0.625 / math.sqrt(7 / 64)
    )
    assert by_name("group_whitened", r, whiten=False) == [0.5] + [-0.5] * 3 + [0.0] * 9


def test_greedy_baseline_counts_token_rewards() -> None:
    """KL in the reward is a part of r: rewards 1 and 3 with token rewards -1/2 and -1/4, -1/4;
    greedy 2 and 1/2: A = -3/2 and 2.
    """
    r = replace(
        rollouts([1.0, 3.0], [0, 1], None, [1, 2]),
        baseline=torch.tensor([2.0, 0.5], dtype=torch.float64),
        token_rewards=torch.tensor([-0.5, -0.25, -0.25], dtype=torch.float64),
    )
    assert by_name("greedy_baseline", r) == [-1.5, 2.0, 2.0]


def test_greedy_baseline() -> None:
    r = rollouts([1.0, 0.0, NAN, 2.0], [0, 0, 0, 1])
    with pytest.raises(InputError, match="greedy"):
        by_name("greedy_baseline", r)
    assert by_name(
        "greedy_baseline", replace(r, baseline=torch.tensor([0.75, 0.75, 0.75, NAN]))
    ) == [0.25, -0.75, 0.0, 0.0]
    assert by_name(
        "greedy_baseline", replace(rollouts([1.0], [0]), baseline=torch.tensor([1.0]))
    ) == [0.0]


def test_optimal_baseline() -> None:
    """Reward 1 with 1 token, 0 with 3: b = 1/4. The episode of 3 tokens lies in two rows."""
    r = rollouts([1.0, 0.0, 0.0, 5.0], [0, 0, 0, 1], [0, 1, 1, 2], [1, 1, 2, 4])
    assert by_name("optimal_baseline", r) == [0.75, -0.25, -0.25, -0.25, 0, 0, 0, 0]
    # no tokens, no gradient, no weight
    untrained = rollouts([1.0, 0.0, 0.5], [0, 0, 0], None, [2, 2, 0])
    assert by_name("optimal_baseline", untrained) == [0.5, 0.5, -0.5, -0.5]
    assert by_name(
        "optimal_baseline", rollouts([1e9 + 1, 1e9], [0, 0], None, [1, 2])
    ) == pytest.approx([2 / 3, -1 / 3, -1 / 3], abs=1e-12)


def test_maxrl() -> None:
    """One success of four: p = 1/4, A = (1 - p)/p = 3 and -1; two of four: 1 and -1.

    No success, no success missing: 0.
    """
    r = rollouts([1.0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1], [0] * 4 + [1] * 4 + [2] * 2 + [3] * 2)
    assert by_name("maxrl", r, eps=0.0) == [3, -1, -1, -1, 1, 1, -1, -1, 0, 0, 0, 0]
    assert by_name("maxrl", r)[0] == pytest.approx(0.75 / 0.2501)
    with pytest.raises(InputError, match="-0.5"):
        by_name("maxrl", rollouts([1.0, -0.5], [0, 0]))
    # totals 0 and 0; p stays 1/2
    penalised = rollouts([1.0, 0.0], [0, 0]).with_token_rewards(torch.tensor([-1.0, 0.0]))
    assert by_name("maxrl", penalised) == [0.0, 0.0]
    penalised = rollouts([1.0, 0.0], [0, 0]).with_token_rewards(torch.tensor([-0.5, 0.0]))
    assert by_name("maxrl", penalised, eps=0.0) == [0.5, -0.5]


def test_pass_at_k() -> None:
    """k = 2 of rewards 1, 0, 0, 1: a success is decisive with 2 of its 3 partners. k = all: best
    minus second best.
    """
    r = rollouts([1.0, 0.0, 0.0, 1.0], [0] * 4)
    assert by_name("pass_at_k", r, k=2) == pytest.approx([2 / 3, 0, 0, 2 / 3])
    assert by_name("pass_at_k", r, k=4) == [0.0] * 4  # two successes: none is decisive
    assert by_name("pass_at_k", rollouts([0.5, 3.0, 2.0, NAN], [0] * 4), k=9) == [
        0.0,
        1.0,
        0.0,
        0.0,
    ]
    assert by_name("pass_at_k", rollouts([0.1, 0.1, 0.1, 7.0], [0, 0, 0, 1]), k=2) == [0.0] * 4
    assert by_name("pass_at_k", r, k=1) == by_name("leave_one_out", r)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 1.0, 0.3, -2.0, 0.7]), min_size=2, max_size=7), st.integers(2, 7)
)
def test_pass_at_k_against_all_subsets(rewards: list[float], k: int) -> None:
    n = len(rewards)
    k = min(k, len(rewards))
    want = []
    for i in range(n):
        sets = [c for c in combinations(range(n), k) if i in c]
        gains = [max(rewards[j] for j in c) - max(rewards[j] for j in c if j != i) for c in sets]
        want.append(math.fsum(gains) / len(sets))
    assert by_name("pass_at_k", rollouts(rewards, [0] * n), k=k) == pytest.approx(want, abs=1e-12)


def test_decoupled() -> None:
    """Two components that differ by a factor of 100 count alike: +-0.5 and +-50 are both
    +-1/sqrt(2) of their sample std.
    """
    r = replace(
        rollouts([101.0, 0, 1, 100], [0] * 4),
        components={"a": torch.tensor([1.0, 0, 1, 0]), "b": torch.tensor([100.0, 0, 0, 100])},
    )
    values = by_name("decoupled", r, eps=0.0)
    # s = +-2u, 0, 0: sample std u sqrt(8/3)
    assert values == pytest.approx([math.sqrt(1.5), -math.sqrt(1.5), 0, 0], abs=1e-12)
    assert by_name("decoupled", r, weights={"b": -1.0}, eps=0.0) == pytest.approx(
        [0, 0, math.sqrt(1.5), -math.sqrt(1.5)], abs=1e-12
    )
    with pytest.raises(InputError, match="token rewards"):
        by_name("decoupled", r.with_token_rewards(torch.ones(4)))
    with pytest.raises(InputError, match="different rewards b"):
        by_name(
            "decoupled",
            replace(
                r,
                rewards=torch.zeros(4),
                episode=torch.tensor([0, 1, 2, 0]),
                components={"b": r.components["b"] + torch.arange(4)},
            ),
        )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_decoupled_against_plain_python(data: st.DataObject) -> None:
    """Normalise each component in its group without what is None, weigh, sum, divide by the batch's
    std (2601.05242).
    """
    n = data.draw(st.integers(2, 9))
    score = st.one_of(st.sampled_from([0.0, 1.0, NAN, 0.1]), st.floats(-4, 4))
    group = data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    components = {name: data.draw(st.lists(score, min_size=n, max_size=n)) for name in ("a", "b")}
    weights = {"a": 2.0}
    known = [any(not math.isnan(c[i]) for c in components.values()) for i in range(n)]
    sums = [0.0] * n
    for name, values in components.items():
        for i, v in enumerate(values):
            same = [
                values[j] for j in range(n) if group[j] == group[i] and not math.isnan(values[j])
            ]
            if not math.isnan(v) and len(same) > 1 and max(same) > min(same):
                sums[i] += (
                    weights.get(name, 1.0)
                    * (v - statistics.fmean(same))
                    / (statistics.stdev(same) + 1e-4)
                )
    scored = [s for s, k in zip(sums, known, strict=True) if k]
    std = statistics.stdev(scored) if len(scored) > 1 else 0.0
    r = replace(
        rollouts([1.0 if k else NAN for k in known], group),
        components={k: torch.tensor(v, dtype=torch.float64) for k, v in components.items()},
    )
    assert by_name("decoupled", r, weights=weights) == pytest.approx(
        [s / (std + 1e-4) for s in sums], rel=1e-9, abs=1e-9
    )


def test_gpg() -> None:
    """Three groups with a score, one of them with signal: +-1/2 times 3.

    The group without any score is not counted.
    """
    r = rollouts([1.0, 0.0, 2.0, 2.0, NAN, NAN, 3.0], [0, 0, 1, 1, 2, 2, 3])
    assert by_name("gpg", r) == [1.5, -1.5, 0, 0, 0, 0, 0]
    assert by_name("gpg", rollouts([0.1] * 3, [0] * 3)) == [0.0] * 3
    sevenths = by_name(
        "gpg", rollouts([1.0, 0.0] * 3 + [1.0, 1.0] * 4, [i // 2 for i in range(14)])
    )
    assert sevenths[0] == 0.5 * 7 / 3  # in float64
