"""Returns-to-go and GAE: by hand, both ways, and never across the border of a row."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reinforge.algorithms.parts.advantages import AdvantageOptions, Rollouts
from reinforge.algorithms.parts.returns import gae, return_to_go
from reinforge.core.errors import InputError

NAN = float("nan")
numbers = st.floats(-3, 3, allow_nan=False)


def rollouts(
    rewards: Sequence[float],
    values: Sequence[Sequence[float]],
    token_rewards: Sequence[Sequence[float]] | None = None,
    *,
    truncated: Sequence[bool] | None = None,
    bootstrap: Sequence[float] | None = None,
) -> Rollouts:
    """Row i has len(values[i]) trained tokens."""
    lengths = torch.tensor([len(v) for v in values])

    def flat(rows: Sequence[Sequence[float]]) -> torch.Tensor:
        return torch.tensor([x for row in rows for x in row], dtype=torch.float64)

    n = len(rewards)
    return Rollouts(
        torch.tensor(rewards, dtype=torch.float64),
        torch.zeros(n, dtype=torch.int64),
        torch.arange(n),
        torch.repeat_interleave(torch.arange(n), lengths),
        lengths,
        {"values": flat(values)},
        None if token_rewards is None else flat(token_rewards),
        None if truncated is None else torch.tensor(truncated),
        bootstrap=None if bootstrap is None else torch.tensor(bootstrap, dtype=torch.float64),
    )


def run(r: Rollouts, **options) -> tuple[list[float], list[float]]:
    out = gae(r, AdvantageOptions(**{"whiten": False, **options}))
    return out["advantages"].tolist(), out["returns"].tolist()


# GAE


def test_five_steps_by_hand() -> None:
    """gamma 1/2, lam 1/2, V = 1, 2, 0, 4, 2, reward 8 at the end:
    delta = 1/2*2-1, 1/2*0-2, 1/2*4-0, 1/2*2-4, 8-2 = 0, -2, 2, -3, 6; A_t = delta_t + A_{t+1}/4:
    A_4 = 6, A_3 = -3/2, A_2 = 13/8, A_1 = -2 + 13/32 = -51/32, A_0 = -51/128."""
    advantages, returns = run(rollouts([8.0], [[1, 2, 0, 4, 2]]), gamma=0.5, lam=0.5)
    assert advantages == [-51 / 128, -51 / 32, 13 / 8, -3 / 2, 6.0]
    assert returns == [77 / 128, 13 / 32, 13 / 8, 5 / 2, 8.0]


def test_truncated_rows_bootstrap_and_ended_rows_do_not() -> None:
    """Reward 1, V = 0.5, bootstrap 4, gamma 1/2: cut off 1 + 2 - 0.5, ended 1 - 0.5, whatever
    stands in `bootstrap` there.
    """
    r = rollouts([1.0, 1.0], [[0.5], [0.5]], truncated=[True, False], bootstrap=[4.0, 4.0])
    assert run(r, gamma=0.5) == ([2.5, 0.5], [3.0, 1.0])
    # no critic asked: ends are ends
    unknown = rollouts([1.0, 1.0], [[0.5], [0.5]], truncated=[True, False])
    assert run(unknown, gamma=0.5)[0] == [0.5, 0.5]
    # it reaches back through gamma and lam
    longer = rollouts([0.0], [[0.0, 0.0]], truncated=[True], bootstrap=[1.0])
    assert run(longer, gamma=0.5, lam=0.5) == ([1 / 8, 1 / 2], [1 / 8, 1 / 2])


def reference(
    values: list[list[float]],
    rewards: list[float],
    tokens: list[list[float]],
    after: list[float],
    gamma: float,
    lam: float,
) -> list[float]:
    """Forward: A_t = sum_l (gamma lam)^l delta_{t+l}, each sum written out."""
    out = []
    for v, r, given_rewards, end in zip(values, rewards, tokens, after, strict=True):
        steps = [x + (r if t == len(v) - 1 else 0.0) for t, x in enumerate(given_rewards)]
        following = [*v[1:], end]
        delta = [steps[t] + gamma * following[t] - v[t] for t in range(len(v))]
        out += [
            math.fsum((gamma * lam) ** i * d for i, d in enumerate(delta[t:]))
            for t in range(len(v))
        ]
    return out


@settings(max_examples=80, deadline=None)
@given(st.data(), st.sampled_from([0.0, 0.5, 0.99, 1.0]), st.sampled_from([0.0, 0.3, 0.95, 1.0]))
def test_backward_recursion_is_the_forward_sum(
    data: st.DataObject, gamma: float, lam: float
) -> None:
    """Rows of 0 to 9 tokens, packed in any order; the sum of each row is done by itself."""
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=6))
    values, tokens = (
        [data.draw(st.lists(numbers, min_size=n, max_size=n)) for n in lengths] for _ in range(2)
    )
    rewards, bootstrap = (
        data.draw(st.lists(numbers, min_size=len(lengths), max_size=len(lengths))) for _ in range(2)
    )
    truncated = data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    r = rollouts(rewards, values, tokens, truncated=truncated, bootstrap=bootstrap)
    after = [b if cut else 0.0 for b, cut in zip(bootstrap, truncated, strict=True)]
    want = reference(values, rewards, tokens, after, gamma, lam)
    advantages, returns = run(r, gamma=gamma, lam=lam)
    assert advantages == pytest.approx(want, abs=1e-11)
    assert returns == pytest.approx(
        [a + v for a, v in zip(want, [x for row in values for x in row], strict=True)], abs=1e-11
    )
    critic = reference(values, rewards, tokens, after, gamma, 1.0)
    _, returns = run(r, gamma=gamma, lam=lam, lam_critic=1.0)
    assert returns == pytest.approx(
        [a + v for a, v in zip(critic, [x for row in values for x in row], strict=True)], abs=1e-11
    )


def test_tokens_of_rows_may_be_interleaved() -> None:
    r = rollouts([1.0, 2.0], [[0.1, 0.2, 0.3], [0.4, 0.5]])
    order = torch.tensor([3, 0, 4, 1, 2])
    mixed = Rollouts(
        r.rewards,
        r.group,
        r.episode,
        r.sequence[order],
        r.lengths,
        {"values": r.streams["values"][order]},
    )
    straight = run(r)[0]
    together = run(mixed)[0]
    assert together == [straight[i] for i in order]


def test_limits_of_lam() -> None:
    """lam 1: return minus value; lam 0: the one-step error."""
    r = rollouts([2.0], [[0.5, 1.5, -1.0]])
    assert run(r, lam=1.0) == ([1.5, 0.5, 3.0], [2.0, 2.0, 2.0])
    assert run(r, lam=0.0) == ([1.0, -2.5, 3.0], [1.5, -1.0, 2.0])


def test_decoupled_and_length_adaptive_lam() -> None:
    """VAPO: alpha 1/2 and rows of 4 and 2 tokens give lam = 1/2 and 0; the critic's targets have
    lam 1.
    """
    r = rollouts([8.0, 8.0, 8.0], [[0, 0, 0, 0], [0, 4], [1]])
    advantages, returns = run(r, length_alpha=0.5, lam_critic=1.0)
    assert advantages == [1.0, 2.0, 4.0, 8.0, 4.0, 4.0, 7.0]
    assert returns == [8.0] * 7
    # without lam_critic: those of the advantages
    assert run(r, length_alpha=0.5)[1] == [1.0, 2.0, 4.0, 8.0, 4.0, 8.0, 8.0]
    assert run(r, lam=0.5, lam_critic=0.0)[1] == [0.0, 0.0, 0.0, 8.0, 4.0, 8.0, 8.0]


def test_lam_of_a_short_row_is_never_negative() -> None:
    """alpha 1/4 and 2 tokens: 1 - 1 / (alpha L) = -1, and lam is 0.

    V = 0, 4 and reward 8: delta = 4, 4, and A is delta.
    """
    assert run(rollouts([8.0], [[0, 4]]), length_alpha=0.25) == ([4.0, 4.0], [4.0, 8.0])


def test_advantages_are_whitened_over_trained_tokens_of_scored_rows_and_returns_are_not() -> None:
    """The unscored row would move mean and std; the row without tokens has none to count."""
    r = rollouts([1.0, NAN, 0.0, 3.0], [[0.5, 0.0, 0.2], [100.0, -100.0], [0.3, 0.9], []])
    plain, targets = run(r, lam=0.9)
    counted = [plain[i] for i in (0, 1, 2, 5, 6)]
    mean = statistics.fmean(counted)
    std = statistics.stdev(counted) + 1e-4
    advantages, returns = run(r, lam=0.9, whiten=None)
    assert advantages == pytest.approx(
        [(a - mean) / std if i not in (3, 4) else 0.0 for i, a in enumerate(plain)], abs=1e-12
    )
    # nothing to learn for the critic
    assert returns == targets and plain[3:5] == [0.0, 0.0] and targets[3:5] == [100.0, -100.0]
    population, _ = run(r, lam=0.9, whiten=True, std="population", eps=0.0)
    assert population[0] == pytest.approx((plain[0] - mean) / statistics.pstdev(counted))


def test_a_single_token_stays_finite() -> None:
    assert run(rollouts([1.0], [[0.3]]), whiten=True)[0] == [0.0]
    assert run(rollouts([NAN], [[0.3]]), whiten=True) == ([0.0], [pytest.approx(0.3)])
    # all equal: nothing to learn
    assert run(rollouts([0.1, 0.1], [[0.0, 0.0], [0.0]]), lam=1.0, whiten=True)[0] == [0.0] * 3


def test_float32_values_are_summed_in_float64() -> None:
    r = rollouts([0.0], [[0.0] * 2000], [[0.1] * 2000])
    narrow = Rollouts(
        r.rewards.float(),
        r.group,
        r.episode,
        r.sequence,
        r.lengths,
        {"values": r.streams["values"].float()},
        r.token_rewards.float(),
    )  # type: ignore[union-attr]
    out = gae(narrow, AdvantageOptions(lam=1.0, whiten=False))["advantages"]
    assert out.dtype is torch.float32 and out[0].item() == pytest.approx(
        2000 * float(torch.tensor(0.1)), rel=1e-7
    )


def test_gae_without_a_critic_says_so() -> None:
    r = rollouts([1.0], [[0.0]])
    with pytest.raises(InputError, match="critic"):
        gae(Rollouts(r.rewards, r.group, r.episode, r.sequence, r.lengths), AdvantageOptions())


# return-to-go


def test_return_to_go_by_hand() -> None:
    """Token rewards 1, 2, 4 and reward 8 with the last: 12, 2 + 6, 1 + 4; the next row
    begins anew.
    """
    r = rollouts([8.0, -2.0, NAN], [[0] * 3, [0] * 2, [0]], [[1, 2, 4], [0, 1], [5]])
    assert return_to_go(r, AdvantageOptions(gamma=0.5, whiten=False)).tolist() == [
        5.0,
        8.0,
        12.0,
        -0.5,
        -1.0,
        0.0,
    ]
    assert return_to_go(r, AdvantageOptions(whiten=False)).tolist() == [
        15.0,
        14.0,
        12.0,
        -1.0,
        -1.0,
        0.0,
    ]


def test_return_to_go_is_whitened_over_tokens() -> None:
    """Rewards 1 (one token) and 0 (three): over tokens mean 1/4 and sample variance 1/4; over rows
    it would be 1/2 and 1/2.
    """
    r = rollouts([1.0, 0.0, NAN], [[0], [0] * 3, [0] * 4])
    values = return_to_go(r, AdvantageOptions()).tolist()
    assert values == pytest.approx([0.75 / 0.5001] + [-0.25 / 0.5001] * 3 + [0.0] * 4, abs=1e-14)
    assert return_to_go(r, AdvantageOptions(std="population", eps=0.0)).tolist()[
        0
    ] == pytest.approx(0.75 / math.sqrt(3 / 16))


@settings(max_examples=50, deadline=None)
@given(st.data(), st.sampled_from([0.0, 0.9, 1.0]))
def test_return_to_go_against_plain_python(data: st.DataObject, gamma: float) -> None:
    lengths = data.draw(st.lists(st.integers(0, 8), min_size=1, max_size=5))
    tokens = [data.draw(st.lists(numbers, min_size=n, max_size=n)) for n in lengths]
    rewards = data.draw(st.lists(numbers, min_size=len(lengths), max_size=len(lengths)))
    want = []
    for row, reward in zip(tokens, rewards, strict=True):
        steps = [*row[:-1], row[-1] + reward] if row else []
        want += [
            math.fsum(gamma**i * x for i, x in enumerate(steps[t:])) for t in range(len(steps))
        ]
    plain = return_to_go(
        rollouts(rewards, tokens, tokens), AdvantageOptions(gamma=gamma, whiten=False)
    ).tolist()
    assert plain == pytest.approx(want, abs=1e-11)
    white = return_to_go(rollouts(rewards, tokens, tokens), AdvantageOptions(gamma=gamma)).tolist()
    if len(want) > 1 and max(want) - min(want) > 1e-6:
        std = statistics.stdev(want) + 1e-4
        assert white == pytest.approx(
            [(x - statistics.fmean(want)) / std for x in want], rel=1e-7, abs=1e-7
        )


def test_gae_with_lam_1_and_no_values_is_the_return_to_go() -> None:
    r = rollouts([1.0, 0.5], [[0.0] * 4, [0.0] * 2], [[0.1, -0.2, 0.3, 0.0], [0.5, 0.5]])
    for whiten in (False, True):
        options = AdvantageOptions(gamma=0.9, lam=1.0, whiten=whiten)
        torch.testing.assert_close(
            gae(r, options)["advantages"], return_to_go(r, options), rtol=0, atol=1e-14
        )
