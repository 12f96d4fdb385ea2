from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reinforge.algorithms.advantages import AdvantageOptions, Rollouts, group_relative
from reinforge.algorithms.shaping import overlong_penalty
from reinforge.core.batch import Batch
from reinforge.core.errors import InputError
from reinforge.core.sample import Sample, Stop

NAN = float("nan")


def rollouts(rewards, group, episode=None, lengths=None, dtype=torch.float64) -> Rollouts:
    n = len(rewards)
    lengths = torch.tensor(lengths or [1] * n)
    return Rollouts(torch.tensor(rewards, dtype=dtype), torch.tensor(group), torch.tensor(episode or list(range(n))),
                    torch.repeat_interleave(torch.arange(n), lengths), lengths)  # fmt: skip


def advantages(*args, **options) -> list[float]:
    return group_relative(rollouts(*args), AdvantageOptions(**options)).tolist()


def test_golden_group_scaling() -> None:
    """Rewards 1, 0, 0, 1: mean 1/2, sample std sqrt(1/3), population std 1/2. Rewards 0, 3: mean 3/2, sample std 3/sqrt(2)."""
    a, b = 0.5 / (math.sqrt(1 / 3) + 1e-4), 1.5 / (3 / math.sqrt(2) + 1e-4)
    assert advantages([1.0, 0.0, 0.0, 1.0, 0.0, 3.0], [0, 0, 0, 0, 7, 7]) == pytest.approx([a, -a, -a, a, -b, b], abs=1e-15)
    assert a == pytest.approx(0.8658754, abs=1e-7)
    population = 0.5 / (0.5 + 1e-4)
    assert advantages([1.0, 0.0, 0.0, 1.0], [0] * 4, std="population") == pytest.approx([population, -population, -population, population])
    assert advantages([0.0, 1.0], [0, 0], eps=1.0)[1] == pytest.approx(0.5 / (math.sqrt(0.5) + 1.0))


def test_golden_batch_and_no_scaling() -> None:
    rewards, group = [1.0, 0.0, 4.0, 6.0], [0, 0, 1, 1]
    assert advantages(rewards, group, scale="none") == [0.5, -0.5, -1.0, 1.0]
    std = statistics.stdev(rewards) + 1e-4
    assert advantages(rewards, group, scale="batch") == pytest.approx([0.5 / std, -0.5 / std, -1 / std, 1 / std], abs=1e-15)
    pstd = statistics.pstdev(rewards) + 1e-4
    assert advantages(rewards, group, scale="batch", std="population")[0] == pytest.approx(0.5 / pstd, abs=1e-15)


def test_every_token_of_a_row_gets_the_rows_advantage() -> None:
    values = group_relative(rollouts([1.0, 0.0], [0, 0], None, [2, 3]), AdvantageOptions(scale="none"))
    assert values.tolist() == [0.5, 0.5, -0.5, -0.5, -0.5]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_give_exactly_zero(scale: str) -> None:
    """Three times 0.1 has a mean that is not 0.1; the other group makes the batch's std large or small."""
    values = advantages([0.1, 0.1, 0.1, 1.0, 0.0], [0, 0, 0, 1, 1], scale=scale)
    assert values[:3] == [0.0, 0.0, 0.0] and values[3] > 0.4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_float_noise_is_not_amplified(dtype: torch.dtype) -> None:
    """Noise of 1e-7 on equal rewards stays below 1e-3 of a real signal; with eps 1e-8 it would be of size 1."""
    values = group_relative(rollouts([1.0, 1.0 + 1.2e-7, 1.0, 1.0], [0] * 4, dtype=dtype), AdvantageOptions())
    assert values.dtype == dtype and 0 < values.abs().max() < 1.1e-3
    amplified = group_relative(rollouts([1.0, 1.0 + 1.2e-7, 1.0, 1.0], [0] * 4, dtype=dtype), AdvantageOptions(eps=1e-8))
    assert amplified.abs().max() > 1


def test_large_offsets_lose_nothing() -> None:
    assert advantages([1e9, 1e9 + 1, 1e9, 1e9 + 1], [0] * 4) == pytest.approx(advantages([0.0, 1.0, 0.0, 1.0], [0] * 4), abs=1e-12)


def test_unscored_rows_get_zero_and_leave_statistics_alone() -> None:
    assert advantages([1.0, NAN, 0.0, NAN], [0, 0, 0, 1]) == pytest.approx([*advantages([1.0, 0.0], [0, 0])[:1], 0.0,
                                                                           *advantages([1.0, 0.0], [0, 0])[1:], 0.0])  # fmt: skip
    assert advantages([1.0, NAN], [0, 0]) == [0.0, 0.0]  # fewer than two are scored
    assert advantages([NAN, NAN], [0, 0], scale="batch") == [0.0, 0.0]
    assert advantages([5.0], [0], scale="none") == [0.0]


def test_forked_rows_count_once() -> None:
    """Episode 0 has three rows of reward 1; statistics must see rewards (1, 0), not (1, 1, 1, 0)."""
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
    rewards = data.draw(st.lists(st.one_of(st.floats(-3, 3), st.just(0.1), st.just(NAN)), min_size=n, max_size=n))
    group = data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    order = data.draw(st.permutations(range(n)))
    straight = advantages(rewards, group, scale=scale)
    relabelled = {g: 100 - 7 * g for g in range(4)}
    shuffled = advantages([rewards[i] for i in order], [relabelled[group[i]] for i in order], scale=scale)
    assert shuffled == [straight[i] for i in order]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.floats(-5, 5), min_size=2, max_size=6), min_size=1, max_size=4))
def test_groups_against_plain_python(groups: list[list[float]]) -> None:
    rewards = [r for g in groups for r in g]
    group = [i for i, g in enumerate(groups) for _ in g]
    expected = [0.0 if max(g) == min(g) else (r - statistics.fmean(g)) / (statistics.stdev(g) + 1e-4) for g in groups for r in g]
    assert advantages(rewards, group) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def sample(uid: str, group: str, reward: float | None, trained: int, **kw) -> Sample:
    return Sample.from_tokens(uid, list(range(trained + 2)), [False, False] + [True] * trained, group=group, reward=reward, **kw)


def test_rollouts_of_packs() -> None:
    """Groups are spread over two packs; a token's row is counted over all of them."""
    first = Batch.pack([sample("a", "x", 1.0, 2), sample("b", "y", None, 1)])
    second = Batch.pack(
        [sample("c", "x", 0.0, 3, stop=Stop.LENGTH, token_rewards=torch.tensor([9.0, 9, 1, 2, 3])), sample("d", "y", 2.0, 0)]
    )
    r = Rollouts.of([first, second])
    assert r.rewards.nan_to_num(-1).tolist() == [1.0, -1.0, 0.0, 2.0] and r.group.tolist() == [0, 1, 0, 1]
    assert r.sequence.tolist() == [0, 0, 1, 2, 2, 2] and r.lengths.tolist() == [2, 1, 3, 0]
    assert r.truncated is not None and r.truncated.tolist() == [False, False, True, False]
    assert r.token_rewards is not None and r.token_rewards.tolist() == [0, 0, 0, 1, 2, 3]
    assert r.streams["behaviour"].tolist() == [0.0] * 6
    assert group_relative(r, AdvantageOptions(scale="none")).tolist() == [0.5, 0.5, 0, -0.5, -0.5, -0.5]


def test_overlong_penalty_is_the_papers() -> None:
    """16384 free tokens, 4096 of buffer (2503.14476, section 4.1)."""
    values = [overlong_penalty(n, 20480, 4096) for n in (1, 16384, 16385, 18432, 20480, 30000)]
    assert values == [0.0, 0.0, -1 / 4096, -0.5, -1.0, -1.0]
    assert overlong_penalty(100, 100, 0) == 0.0
